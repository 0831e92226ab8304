"""The ports of a job, which SECURITY.md names, and what must hold when strangers have attacked them."""

from __future__ import annotations

import re
from pathlib import Path

from hvd_train.run_files.ledger import audit
from tests.support import hosts
from tests.support.elastic_hosts import ROOT
from tests.support.strangers import BODY, Siege


def named() -> dict[str, set[tuple[str, str]]]:
    """Return, for each kind of job, the process and the address of each port that SECURITY.md names."""
    rows = re.findall(
        r"^\| `([^`]+)` \| (\w+) \| `([\w.:]+)` \|", (ROOT / "SECURITY.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    found: dict[str, set[tuple[str, str]]] = {}
    for job, process, address in rows:
        found.setdefault(job, set()).add((process, address))
    return found


def unharmed(job: str, siege: Siege, run: Path, code: int, printed: str) -> None:
    """Assert that nothing has come of the attacks on a job, and that it has no port that SECURITY.md does not name."""
    assert code == 0, printed
    assert not (run.parent / "owned").exists(), "code of a stranger ran"
    assert "Traceback" not in printed, printed
    assert audit(run).faults == ()
    assert siege.growth < BODY, "what a stranger sends is kept"
    found = {(port.process, hosts.named(port.address)) for port in siege.ports}
    unnamed = found - named().get(job, set())
    assert not unnamed, f"SECURITY.md does not name {sorted(unnamed)}"

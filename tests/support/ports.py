"""The ports of a job in SECURITY.md, and what must hold after attacks on them."""

import re
from pathlib import Path

from hvd_train.run_files.ledger import audit
from tests.support import hosts
from tests.support.elastic_hosts import ROOT
from tests.support.strangers import BODY, Siege


def named() -> dict[str, set[tuple[str, str]]]:
    """Return the process and address of each port that SECURITY.md names, by kind of job."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    return {
        job: {
            (process, address)
            for process, addresses in re.findall(r"(\w+) ((?:`[\w.:]+` ?)+)", cell)
            for address in re.findall(r"`([^`]+)`", addresses)
        }
        for job, cell in re.findall(r"^\| `([^`]+)` \| (\w+ `.*) \|$", text, re.MULTILINE)
    }


def unharmed(job: str, siege: Siege, run: Path, code: int, printed: str) -> None:
    """Assert that attacks on a job had no effect, and that SECURITY.md names all its ports."""
    assert code == 0, printed
    assert not (run.parent / "owned").exists(), "code of an attacker ran"
    assert "Traceback" not in printed, printed
    assert audit(run).faults == ()
    assert siege.growth < BODY, "data of an attacker is kept"
    found = {(port.process, hosts.named(port.address)) for port in siege.ports}
    assert found <= named().get(job, set())

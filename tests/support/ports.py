"""The ports that SECURITY.md names."""

from __future__ import annotations

import re

from tests.support.elastic_hosts import ROOT


def named() -> dict[str, set[tuple[str, str]]]:
    """Return, for each kind of job, the process and the address of each port that SECURITY.md names."""
    rows = re.findall(
        r"^\| `([^`]+)` \| (\w+) \| `([\w.:]+)` \|", (ROOT / "SECURITY.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    found: dict[str, set[tuple[str, str]]] = {}
    for job, process, address in rows:
        found.setdefault(job, set()).add((process, address))
    return found

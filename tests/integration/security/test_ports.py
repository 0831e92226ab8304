"""What the processes of a job listen on, and what comes of it when another account of the machine finds that."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from hvd_train.run_files.ledger import audit
from tests.support.elastic_hosts import ROOT, SCRIPTS
from tests.support.launching import HVD_TRAIN, launch_line, started
from tests.support.strangers import NEEDS_ROOT, besieged

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(bool(NEEDS_ROOT), reason=NEEDS_ROOT or "-"),
]

TRAIN = ["--epochs", "3", "--output-dir", "run", "--ledger", "--device", "cpu", "--data", "digits"]
PORTS = ROOT / "SECURITY.md"


def named() -> dict[str, set[tuple[str, str]]]:
    """Return, for each kind of job, the process and the address of each port that SECURITY.md names."""
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| `([\d.:]+)` \|", PORTS.read_text(), re.MULTILINE)
    found: dict[str, set[tuple[str, str]]] = {}
    for job, process, address in rows:
        found.setdefault(job, set()).add((process, address))
    return found


JOBS: dict[str, Sequence[str]] = {
    "horovodrun --gloo": launch_line("gloo", 2, HVD_TRAIN, "train", "digits", *TRAIN),
    "horovodrun --mpi": launch_line("mpi", 2, HVD_TRAIN, "train", "digits", *TRAIN),
    "train_elastic.sh": [str(SCRIPTS / "train_elastic.sh"), "-np", "2", "--", "digits", *TRAIN],
    "hvd-train train": [HVD_TRAIN, "train", "digits", *TRAIN],
}


@pytest.mark.parametrize("job", JOBS)
def test_whatever_a_stranger_sends_the_job_goes_on(job: str, tmp_path: Path) -> None:
    """Nothing runs, ends or grows; each port is named in SECURITY.md, and one line tells the user."""
    owned, output = tmp_path / "owned", tmp_path / "output.txt"
    tmp_path.chmod(0o777)
    with started(list(JOBS[job]), tmp_path, output) as launcher, besieged(launcher.pid, owned) as siege:
        try:
            code = launcher.wait(200)
        except subprocess.TimeoutExpired:
            pytest.fail(output.read_text())
    printed = output.read_text()
    assert code == 0, printed
    assert not owned.exists(), "code of a stranger ran"
    assert "Traceback" not in printed, printed
    assert audit(tmp_path / "run").faults == ()
    assert {(process, address) for process, address, _ in siege.ports} <= named().get(job, set())
    store = [port for process, _, port in siege.ports if process == "launcher"]
    assert printed.count("refused a request") == (1 if store else 0), printed

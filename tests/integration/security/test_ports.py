"""What the processes of a job listen on, and what comes of it when another account of the machine finds that."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.elastic_hosts import NO_HOSTS, SCRIPTS
from tests.support.hosts import Hosts
from tests.support.launching import HVD_TRAIN, launch_line, started
from tests.support.ports import unharmed
from tests.support.strangers import NEEDS_ROOT, Siege, below, besieged, on

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(bool(NEEDS_ROOT), reason=NEEDS_ROOT or "-"),
]

TRAIN = ["--epochs", "3", "--output-dir", "run", "--ledger", "--device", "cpu", "--data", "digits"]

JOBS: dict[str, Sequence[str]] = {
    "horovodrun --gloo": launch_line("gloo", 2, HVD_TRAIN, "train", "digits", *TRAIN),
    "horovodrun --mpi": launch_line("mpi", 2, HVD_TRAIN, "train", "digits", *TRAIN),
    "train_mpirun.sh": [str(SCRIPTS / "train_mpirun.sh"), "hostfile", "--", "digits", *TRAIN],
    "train_elastic.sh": [str(SCRIPTS / "train_elastic.sh"), "-np", "2", "--", "digits", *TRAIN],
    "hvd-train train": [HVD_TRAIN, "train", "digits", *TRAIN],
}


def assert_told(siege: Siege, printed: str) -> None:
    """Assert that the launcher has told the user once of what each of its stores has refused."""
    stores = [port for port in siege.ports if port.process == "launcher"]
    assert bool(stores) <= printed.count("refused a request") <= len(stores), printed


@pytest.mark.parametrize("job", JOBS)
def test_whatever_a_stranger_sends_the_job_goes_on(job: str, tmp_path: Path) -> None:
    """Nothing runs, ends or grows; each port is named in SECURITY.md, and one line tells the user."""
    output = tmp_path / "output.txt"
    tmp_path.chmod(0o777)
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    with (
        started(list(JOBS[job]), tmp_path, output) as launcher,
        besieged(below(launcher.pid), tmp_path / "owned") as siege,
    ):
        try:
            code = launcher.wait(200)
        except subprocess.TimeoutExpired:
            pytest.fail(output.read_text())
    unharmed(job, siege, tmp_path / "run", code, output.read_text())
    assert_told(siege, output.read_text())


ON_TWO = {
    "train_hostfile.sh": ["train_hostfile.sh", "hostfile"],
    "train_mpirun.sh": ["train_mpirun.sh", "hostfile"],
    "train_elastic.sh": ["train_elastic.sh", "--hosts", "hostfile"],
}


@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "-")
@pytest.mark.parametrize("way", ON_TWO)
def test_strangers_on_both_hosts_of_a_job(way: str, hosts: Hosts, tmp_path: Path) -> None:
    """So it is where a job runs on two hosts and is attacked from each of them."""
    output = tmp_path / "output.txt"
    tmp_path.chmod(0o777)
    (tmp_path / "hostfile").write_text("h1 slots=1\nh2 slots=1\n")
    script, *options = ON_TWO[way]
    line = [f"HOME={tmp_path}", str(SCRIPTS / script), *options, "--", "digits", *TRAIN]
    with (
        besieged(on(hosts), tmp_path / "owned", hosts) as siege,
        started(hosts.typed("h1", tmp_path, *line), tmp_path, output) as launcher,
    ):
        try:
            code = launcher.wait(200)
        except subprocess.TimeoutExpired:
            pytest.fail(output.read_text())
    unharmed(f"{way}, two hosts", siege, tmp_path / "run", code, output.read_text())
    assert_told(siege, output.read_text())

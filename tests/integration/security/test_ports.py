"""The ports of a job, attacked by another account of the machine."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.hosts import NO_HOSTS, OWN, SCRIPTS, Hosts
from tests.support.launching import HVD_TRAIN, launch_line, started
from tests.support.strangers import NEEDS_ROOT, Port, below, besieged, on, unharmed

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


def check(job: str, ports: set[Port], launcher: subprocess.Popen[bytes], folder: Path) -> None:
    """Assert that the attacks had no effect, and that each store of the
    launcher reported them once.
    """
    printed = (folder / "output.txt").read_text()
    unharmed(job, ports, folder / "run", launcher.returncode, printed)
    stores = [port for port in ports if port.process == "launcher"]
    assert bool(stores) <= printed.count("refused a request") <= len(stores), printed


@pytest.mark.parametrize("job", JOBS)
def test_a_job_survives_attacks_by_another_user(job: str, tmp_path: Path) -> None:
    """Nothing runs or ends; SECURITY.md names each port, and one line reports the attack."""
    tmp_path.chmod(0o777)
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    with (
        started(list(JOBS[job]), tmp_path, tmp_path / "output.txt") as launcher,
        besieged(below(launcher.pid), tmp_path / "owned") as ports,
    ):
        launcher.wait(280)
    check(job, ports, launcher, tmp_path)


@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "-")
@pytest.mark.parametrize(
    "way",
    ["train_hostfile.sh hostfile", "train_mpirun.sh hostfile", "train_elastic.sh --hosts hostfile"],
)
def test_a_job_on_two_hosts_survives_attacks_from_both(
    way: str, hosts: Hosts, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "hostfile").write_text("h1 slots=1\nh2 slots=1\n")
    script, *options = way.split()
    line = [*OWN, f"HOME={tmp_path}", str(SCRIPTS / script), *options, "--", "digits", *TRAIN]
    with (
        besieged(on(hosts), tmp_path / "owned", hosts) as ports,
        started(hosts.inside("h1", tmp_path, *line), tmp_path, tmp_path / "output.txt") as launcher,
    ):
        launcher.wait(280)
    check(f"{script}, two hosts", ports, launcher, tmp_path)

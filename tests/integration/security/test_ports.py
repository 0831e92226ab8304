"""The ports and secrets of a job, attacked by another account, on its hosts as well."""

import json
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.hosts import NO_HOSTS, ROOT, SCRIPTS, WAYS, Hosts
from tests.support.launching import HVD_TRAIN, PROGRAMS, launch_line, started, wait_for
from tests.support.strangers import (
    NEEDS_ROOT,
    Port,
    below,
    besieged,
    on,
    plant_key,
    spellings,
    spying,
    unharmed,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(bool(NEEDS_ROOT), reason=NEEDS_ROOT or "-"),
]

TRAIN = "digits --epochs 3 --ledger --device cpu --output-dir"
RUN = f"{TRAIN} run"

# Random, as another run of these tests may be on the same machine.
SECRET = f"PLANTED-{uuid4().hex}".encode()
KEY = uuid4().hex.encode()
SECRETS = {**spellings("secret", SECRET), **spellings("key", KEY)}
CONTROL = f"everyone-may-read-this-{uuid4().hex[:8]}"

JOBS = {
    "horovodrun --gloo": launch_line("gloo", 2, HVD_TRAIN, "train", *RUN.split()),
    "horovodrun --mpi": launch_line("mpi", 2, HVD_TRAIN, "train", *RUN.split()),
    "train_mpirun.sh": [f"{SCRIPTS}/train_mpirun.sh", *f"hostfile -- {RUN}".split()],
    "train_elastic.sh": [f"{SCRIPTS}/train_elastic.sh", *f"-np 2 -- {RUN}".split()],
    "hvd-train train": [HVD_TRAIN, "train", *RUN.split()],
    "torchrun": [
        f"{PROGRAMS}/torchrun",
        *["--standalone", "--nproc-per-node=2", "--no-python"],
        *(HVD_TRAIN, "train", *RUN.split()),
    ],
}


def check(job: str, ports: set[Port], launcher: subprocess.Popen[bytes], run: Path) -> None:
    """Assert that the attacks had no effect, and that each store of the launcher, or of
    rank 0 under torchrun, reported them once.
    """
    printed = (run.parent / "output.txt").read_text()
    unharmed(job, ports, run, launcher.returncode, printed)
    stores = [port for port in ports if port.process == "launcher"]
    most = len(stores) or job == "torchrun"
    assert bool(most) <= printed.count("refused a request") <= most, printed


@pytest.mark.parametrize("job", JOBS)
def test_a_job_survives_attacks_by_another_user(job: str, tmp_path: Path) -> None:
    """Nothing runs or ends; SECURITY.md names each port, and one line reports the attack."""
    tmp_path.chmod(0o777)
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    with (
        started(JOBS[job], tmp_path, tmp_path / "output.txt") as launcher,
        besieged(below(launcher.pid), tmp_path / "owned") as ports,
    ):
        launcher.wait(280)
    check(job, ports, launcher, tmp_path / "run")


@pytest.fixture
def _planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put secrets into the environment and make the key of the job known."""
    for name in ("AWS_SECRET_ACCESS_KEY", "NAMED_SECRET"):
        monkeypatch.setenv(name, SECRET.decode())
    monkeypatch.setenv("NCCL_PLANTED", "two\nlines")
    monkeypatch.setenv("HOROVOD_PLANTED", "it's")
    monkeypatch.setenv("PYTHONPATH", f"{plant_key(tmp_path / 'site', KEY)}:{ROOT}")
    for name in ("OMP_NUM_THREADS", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HOME", str(tmp_path))  # Horovod caches facts about hosts there


@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "-")
@pytest.mark.usefixtures("_planted")
@pytest.mark.parametrize("way", WAYS)
def test_a_job_on_two_hosts_survives_attacks_from_both(
    way: str, hosts: Hosts, tmp_path: Path
) -> None:
    """No process on either host shows a secret; the other host gets what training needs and
    what --env names.
    """
    tmp_path.chmod(0o777)
    (tmp_path / "hostfile").write_text("h1 slots=1\nh2 slots=1\n")
    script, *options = WAYS[way]
    log = tmp_path / "output.txt"
    line = [str(SCRIPTS / script), *options, "--env", "NAMED_SECRET", "--", *TRAIN.split(), CONTROL]
    with (
        spying({**SECRETS, "control": CONTROL.encode()}) as seen,
        besieged(on(hosts), tmp_path / "owned", hosts) as ports,
        started(hosts.inside("h1", tmp_path, *line), tmp_path, log) as launcher,
    ):
        wait_for(
            "workers", lambda: launcher.poll() is not None or all(map(hosts.workers, ("h1", "h2")))
        )
        assert launcher.poll() is None, log.read_text()
        here, there = (hosts.workers(name)[0].environ() for name in ("h1", "h2"))
        launcher.wait(280)
    mpi = " --mpi" * ("--mpi" in options)
    check(f"{script}{mpi}, two hosts", ports, launcher, tmp_path / CONTROL)
    assert json.loads((tmp_path / CONTROL / "summary.json").read_text())["world_size"] == 2
    assert "AWS_SECRET_ACCESS_KEY" not in there
    assert here["AWS_SECRET_ACCESS_KEY"] == there["NAMED_SECRET"] == SECRET.decode()
    assert (there["NCCL_PLANTED"], there["HOROVOD_PLANTED"]) == ("two\nlines", "it's")
    assert len(seen.pop("control")) >= 3, "neither the launcher nor its ranks were seen"
    assert not seen

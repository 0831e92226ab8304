"""A real Slurm on hosts of `tests.hosts`: sbatch, srun, preemption and the way back from the queue."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import hosts as cluster
from tests.elastic_hosts import ROOT, SCRIPTS
from tests.hosts import Hosts
from tests.launching import PROGRAMS, wait_for

PATH = f"{PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin"
MISSING = [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name, path=PATH) is None]
NO_SLURM = f"{', '.join(MISSING)} not on this machine: apt install slurmctld slurmd munge" if MISSING else ""
NO_HOSTS = cluster.missing() or NO_SLURM

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "-"),
]

# A job that comes back waits until what it was started with is void: two minutes, unless told (cred_expire).
CONF = """
ClusterName=test
SlurmctldHost=h1
AuthType=auth/munge
AuthInfo=cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
NodeName=h1,h2 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
"""


@dataclass
class Slurm:
    """A cluster of h1 and h2."""

    hosts: Hosts
    folder: Path

    def command(self, *words: str) -> str:
        """Run a command on h1 as a user would; what it prints."""
        environment = [
            f"PATH={PATH}",
            f"SLURM_CONF={self.folder}/slurm.conf",
            f"PYTHONPATH={ROOT}",
            "OMP_NUM_THREADS=1",
        ]
        command = self.hosts.inside("h1", self.folder, "env", *environment, *words)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def output(self, job: str) -> str:
        """What a batch job has printed."""
        path = self.folder / f"hvd_train-{job}.out"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """Its daemons live in the hosts' processes, and die with them."""
    with cluster.hosts(tmp_path / "cluster", 2, names=2) as hosts:
        folder = tmp_path / "slurm"
        folder.mkdir()
        for name in ("state", "spool-h1", "spool-h2"):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        for name in hosts.inits:
            setup = (
                f"install -d -m 711 -o munge /run/munge && install -m 600 -o munge {key} /run/munge/key && "
                "setpriv --reuid=munge --regid=munge --clear-groups munged --key-file /run/munge/key --force && "
                f"{'slurmctld -i && ' if name == 'h1' else ''} slurmd -N {name}"
            )
            start = ["env", f"PATH={PATH}", f"SLURM_CONF={folder}/slurm.conf", "sh", "-ec", setup]
            with (folder / f"{name}.out").open("wb") as log:
                subprocess.run(hosts.inside(name, folder, *start), check=True, stdout=log, stderr=log, timeout=60)
        found = Slurm(hosts, folder)
        wait_for("two idle nodes", lambda: "2 idle" in found.command("sinfo", "-h", "-o", "%D %t"))
        yield found


def test_ranks_by_srun(slurm: Slurm) -> None:
    """`srun hvd-train train` is all it takes: a rank for each task, on both nodes."""
    slurm.command("srun", "-N", "2", "-n", "2", "hvd-train", "train", "digits", "--epochs", "2", "--output-dir", "run")
    summary = json.loads((slurm.folder / "run/summary.json").read_text())
    assert (summary["finished"], summary["world_size"]) == (True, 2)


@pytest.mark.parametrize("way", [[], ["--horovodrun", "--"]])
def test_preempted_and_back(way: list[str], slurm: Slurm) -> None:
    """SIGTERM as from a preemption: a commit, back into the queue, and on to the end in the same folder."""
    batch = ["sbatch", "--parsable", "--nodes", "2", "--ntasks-per-node", "1", str(SCRIPTS / "train_slurm.sbatch")]
    job = slurm.command(*batch, *way, "digits", "--epochs", "12")
    wait_for("two epochs", lambda: "epoch  2/12" in slurm.output(job), limit_s=120)
    slurm.command("scancel", "--signal=TERM", *(["--batch"] if way else []), job)
    wait_for("the way back into the queue", lambda: "back into the queue" in slurm.output(job))
    assert "committed; the same command goes on from there" in slurm.output(job)
    wait_for("the end", lambda: "done: top-1" in slurm.output(job), limit_s=150)
    assert "going on at epoch" in slurm.output(job)
    summary = json.loads((slurm.folder / f"runs/slurm-{job}/summary.json").read_text())
    assert (summary["finished"], summary["epochs"], summary["world_size"]) == (True, 12, 2)

"""A real Slurm on the hosts of `tests.support.hosts`."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import hosts as cluster
from tests.support.elastic_hosts import ON_HOSTS, ROOT
from tests.support.hosts import Hosts
from tests.support.launching import PROGRAMS, wait_for

PATH = f"{PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin"
HAS_SLURM = all(shutil.which(name, path=PATH) for name in ("slurmctld", "slurmd", "munged"))
ON_SLURM = [*ON_HOSTS, pytest.mark.skipif(not HAS_SLURM, reason="no Slurm: apt install slurmctld slurmd munge")]

# A requeued job waits until its credentials have expired (cred_expire): two minutes by default.
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
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
NodeName=h1,h2 CPUs=4 Gres=gpu:4 State=UNKNOWN
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass
class Slurm:
    """A Slurm cluster of h1 and h2."""

    hosts: Hosts
    folder: Path

    def words(self, *words: str) -> list[str]:
        """Return the command that runs another one on h1 as a user would."""
        own = [f"PATH={PATH}", f"SLURM_CONF={self.folder}/slurm.conf", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1"]
        home = f"HOME={self.folder}"  # nodes share it: rank 0 of a plain srun leaves the key there
        return self.hosts.inside("h1", self.folder, "env", *own, home, *words)

    def command(self, *words: str) -> str:
        done = subprocess.run(self.words(*words), capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def output(self, job: str) -> str:
        path = self.folder / f"hvd_train-{job}.out"
        return path.read_text() if path.exists() else ""


@contextmanager
def slurm_on_hosts(tmp: Path) -> Iterator[Slurm]:
    """Run a Slurm cluster in this folder; its daemons end with their hosts."""
    with cluster.hosts(tmp / "cluster", 2, names=2) as hosts:
        folder = tmp / "slurm"
        for name in ("state", "spool-h1", "spool-h2"):
            (folder / name).mkdir(parents=True)
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        stand_ins = ("null", "zero", "full", "random")  # Slurm counts the devices, and looks no further
        (folder / "gres.conf").write_text("".join(f"Name=gpu File=/dev/{name}\n" for name in stand_ins))
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
                subprocess.run(hosts.inside(name, folder, *start), check=True, stdout=log, stderr=log, timeout=200)
        found = Slurm(hosts, folder)
        wait_for("two idle nodes", lambda: "2 idle" in found.command("sinfo", "-h", "-o", "%D %t"))
        yield found

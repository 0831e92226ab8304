"""A real Slurm on the hosts of `tests.support.hosts`: sbatch, srun, preemption and the way back from the queue."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import hosts as cluster
from tests.support.documented import commands
from tests.support.elastic_hosts import ROOT, SCRIPTS
from tests.support.hosts import Hosts
from tests.support.launching import PROGRAMS, started, wait_for

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
SlurmdParameters=config_overrides
SelectType=select/cons_tres
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
        environment = [
            f"PATH={PATH}",
            f"SLURM_CONF={self.folder}/slurm.conf",
            f"PYTHONPATH={ROOT}",
            "OMP_NUM_THREADS=1",
        ]
        return self.hosts.inside("h1", self.folder, "env", *environment, *words)

    def command(self, *words: str) -> str:
        """Run a command on h1 and return its output."""
        done = subprocess.run(self.words(*words), capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def output(self, job: str) -> str:
        """Return everything that a batch job has printed."""
        path = self.folder / f"hvd_train-{job}.out"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """Run a Slurm cluster; its daemons are processes of the hosts and die with them."""
    with cluster.hosts(tmp_path / "cluster", 2, names=2) as hosts:
        folder = tmp_path / "slurm"
        folder.mkdir()
        for name in ("state", "spool-h1", "spool-h2"):
            (folder / name).mkdir()
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
                subprocess.run(hosts.inside(name, folder, *start), check=True, stdout=log, stderr=log, timeout=60)
        found = Slurm(hosts, folder)
        wait_for("two idle nodes", lambda: "2 idle" in found.command("sinfo", "-h", "-o", "%D %t"))
        yield found


def test_ranks_by_srun(slurm: Slurm) -> None:
    """`srun hvd-train train` starts a rank for each task on both nodes, with arguments as typed."""
    folder = "a run; with $(signs) and 'quotes'"
    slurm.command("srun", "-N", "2", "-n", "2", "hvd-train", "train", "digits", "--epochs", "2", "--output-dir", folder)
    summary = json.loads((slurm.folder / folder / "summary.json").read_text())
    assert (summary["finished"], summary["world_size"]) == (True, 2)


def test_a_job_that_matters_more(slurm: Slurm) -> None:
    """A job of another partition takes the nodes: the training commits in time and finishes afterwards."""
    batch = ["sbatch", "--parsable", "--nodes", "2", "--ntasks-per-node", "1", str(SCRIPTS / "train_slurm.sbatch")]
    job = slurm.command(*batch, "digits", "--epochs", "12")
    wait_for("two epochs", lambda: "epoch  2/12" in slurm.output(job), limit_s=120)
    slurm.command(
        "sbatch", "-p", "urgent", "--exclusive", "-N", "2", "--output=urgent.out", "--wrap", "echo it matters"
    )
    wait_for("the other job", lambda: (slurm.folder / "urgent.out").exists(), limit_s=120)
    assert "committed; the same command goes on from there" in slurm.output(job)
    assert "done: top-1" not in slurm.output(job)
    wait_for("the end", lambda: "done: top-1" in slurm.output(job), limit_s=150)
    assert "going on at epoch" in slurm.output(job)


def test_elastic_in_an_allocation(slurm: Slurm) -> None:
    """`train_elastic.sh --slurm` trains on the nodes that answer; one that is taken down leaves and comes back."""
    command = ["salloc", "--no-kill", "-N", "2", str(SCRIPTS / "train_elastic.sh"), "--slurm", "--", "digits"]
    with started(slurm.words(*command, "--epochs", "400", "--output-dir", "run"), slurm.folder, slurm.folder / "out"):
        output = (slurm.folder / "out").read_text
        wait_for("two epochs", lambda: "epoch   2/400" in output() and "2 ranks" in output(), limit_s=120)
        slurm.command("scontrol", "update", "NodeName=h2", "State=DOWN", "Reason=test")
        wait_for("one to go on", lambda: "world 2 -> 1" in output(), limit_s=60)
        slurm.command("scontrol", "update", "NodeName=h2", "State=RESUME")
        wait_for("two again", lambda: "world 1 -> 2" in output(), limit_s=90)


@pytest.mark.parametrize("way", [[], ["--horovodrun", "--"]])
def test_preempted_and_back(way: list[str], slurm: Slurm) -> None:
    """SIGTERM, as from a preemption, commits and requeues the job, which finishes in the same folder."""
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


@pytest.mark.parametrize("line", commands("clusters.md")["Slurm"])
def test_a_documented_command(line: str, slurm: Slurm) -> None:
    """A command of docs/clusters.md, typed as printed from a checkout, trains on the tasks that it names."""
    (slurm.folder / "horovodrun_scripts").symlink_to(SCRIPTS)
    printed = slurm.command("bash", "-c", line)
    if line.startswith("sbatch"):
        job = printed.split()[-1]
        wait_for("the end", lambda: "done: top-1" in slurm.output(job), limit_s=200)
        printed = slurm.output(job)
    assert re.search(r"done: top-1 .* on 4 ranks", printed), printed

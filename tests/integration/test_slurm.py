"""A real Slurm on the hosts of `tests.support.hosts`: sbatch, srun, preemption and requeueing."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hangs import check_answer
from tests.support.hosts import OBEDIENT, ON_SLURM, PATH, SCRIPTS, Slurm, slurm_on_hosts
from tests.support.launching import HVD_TRAIN, commands, started, wait_for, write_program
from tests.support.on_demand import pace

pytestmark = ON_SLURM

SBATCH = ["sbatch", "--parsable", "--nodes", "2", "--ntasks-per-node", "1"]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with slurm_on_hosts(tmp_path) as found:
        yield found


def test_a_preempted_job_commits_and_finishes_later(slurm: Slurm) -> None:
    """A job of another partition takes the nodes; the training commits
    in time and finishes later.
    """
    job = slurm.command(*SBATCH, str(SCRIPTS / "train_slurm.sbatch"), "digits", "--epochs", "12")
    wait_for("two epochs", lambda: "epoch  2/12" in slurm.output(job))
    urgent = "sbatch -p urgent --exclusive -N 2 --output=urgent.out --wrap date"
    slurm.command(*urgent.split())
    wait_for("the other job", lambda: (slurm.folder / "urgent.out").exists())
    assert "committed; the same command resumes from there" in slurm.output(job)
    assert "done: top-1" not in slurm.output(job)
    wait_for("the end", lambda: "done: top-1" in slurm.output(job))
    assert "resuming at epoch" in slurm.output(job)


def test_elastic_in_an_allocation(slurm: Slurm) -> None:
    """A node that goes down leaves and comes back."""
    options = ["--with", "slurm", "--", "digits", "--epochs", "400", "--output-dir", "run"]
    script = [str(SCRIPTS / "train_elastic.sh"), *options]
    command = slurm.words("salloc", "--no-kill", "-N", "2", *script)
    with started(command, slurm.folder, slurm.folder / "out"):
        output = (slurm.folder / "out").read_text
        wait_for("two epochs", lambda: "epoch   2/400" in output() and "2 ranks" in output())
        slurm.command("scontrol", "update", "NodeName=h2", "State=DOWN", "Reason=test")
        wait_for("one rank to continue", lambda: "world 2 -> 1" in output())
        slurm.command("scontrol", "update", "NodeName=h2", "State=RESUME")
        wait_for("two again", lambda: "world 1 -> 2" in output())


def test_the_warning_before_the_time_limit(slurm: Slurm) -> None:
    """The job commits before the limit and is requeued."""
    pace(slurm.folder, 1)
    batch = [*SBATCH, "--time", "3", str(SCRIPTS / "train_slurm.sbatch")]
    training = ["digits", "--model", OBEDIENT, "--epochs", "12"]
    job = slurm.command(*batch, *training)
    wait_for("the requeue", lambda: "back into the queue" in slurm.output(job))
    assert "committed; the same command resumes from there" in slurm.output(job)
    assert "TIME LIMIT" not in slurm.output(job)
    (slurm.folder / "pace").unlink()
    wait_for("the end", lambda: "done: top-1" in slurm.output(job))
    assert "resuming at epoch" in slurm.output(job)
    summary = json.loads((slurm.folder / f"runs/slurm-{job}/summary.json").read_text())
    assert (summary["finished"], summary["epochs"], summary["world_size"]) == (True, 12, 2)


def test_what_holds_a_rank_is_named_without_ssh(slurm: Slurm) -> None:
    """Its node is asked by a step beside the ranks, which have all that the job has."""
    no_ssh = write_program(slurm.folder / "bin", "ssh", "exit 255").parent
    own = ["env", f"PATH={no_ssh}:{PATH}"]
    step = "srun -N 2 --exclusive python mine.py session lock"
    why = slurm.words(*own, HVD_TRAIN, "why", "run")
    check_answer("lock", slurm.folder, slurm.words(*own, *step.split()), why, host="h2")


@pytest.mark.parametrize("line", commands("clusters.md")["Slurm"])
def test_a_documented_command(line: str, slurm: Slurm) -> None:
    """Commands of docs/clusters.md train as printed, on the tasks that they name."""
    (slurm.folder / "horovodrun_scripts").symlink_to(SCRIPTS)
    printed = slurm.command("bash", "-c", line)
    if line.startswith("sbatch"):
        job = printed.split()[-1]
        wait_for("the end", lambda: "done: top-1" in slurm.output(job))
        printed = slurm.output(job)
    assert re.search(r"done: top-1 .* on 4 ranks", printed), printed

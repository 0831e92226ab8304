"""Elastic training on three hosts with ssh between them, through faults
and changes of the cluster.
"""

import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from hvd_train import checkpoint
from tests.support import on_demand
from tests.support.hosts import (
    ALL,
    ON_HOSTS,
    OWN_LOOP,
    STEPS_PER_EPOCH,
    Hosts,
    Job,
    arguments,
    hosts_fixture,
    job,
    undisturbed,
)
from tests.support.launching import wait_for
from tests.support.runs import Weights

STEPS = 8 * STEPS_PER_EPOCH
AWAY_S = 6.0  # workers wait 10 s for the driver
RARE = arguments(more="--output-dir run --commit-steps 1000")
OFTEN = arguments(more="--commit-steps 10")
LIMIT = ["HOROVOD_GLOO_TIMEOUT_SECONDS=2"]

pytestmark = ON_HOSTS

hosts = hosts_fixture(3, names=4)  # h4 is a name without a machine


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


def unplug_for_a_while(job: Job) -> None:
    job.hosts.unplug("h2")
    reached = len(job.changes)
    wait_for("the others to continue", lambda: len(job.changes) > reached)
    job.hosts.plug("h2")


def take_and_add(job: Job) -> None:
    job.hosts.boot("h4")
    job.list("h1", "h3", "h4")


def kill_ssh(job: Job) -> None:
    """Kill the ssh of a worker, which ends as well."""
    left = job.worker("h2")
    for one, words in job.hosts.processes("h1"):
        if words[:1] == ["ssh"] and "h2" in words:
            one.kill()
    wait_for("its end", lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE)


FAULTS = {
    "kill ssh": kill_ssh,
    "power off": lambda job: job.hosts.power_off("h3"),
    "stop": lambda job: job.worker("h2").send_signal(signal.SIGSTOP),
    "partition": unplug_for_a_while,
    "out and in": take_and_add,
    "rank 0's host is taken from the list": lambda job: job.list("h2", "h3"),
    "unreachable": lambda job: job.list("h1", "h2", "h3", "h4"),
    "an error in the model": lambda job: on_demand.fail(
        job.folder, "h2", "an error in the user's model"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault(name: str, hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """No step is lost, each sample counts once per epoch, and the weights
    are the undisturbed ones.
    """
    with job(hosts, tmp_path) as running:
        running.after(random.Random(name).randint(15, 35))
        FAULTS[name](running)
        running.completes(expected)
    assert running.changes or name in ("out and in", "unreachable")
    assert ("RuntimeError: an error in the user's model" in running.output) == (
        name == "an error in the model"
    )


def test_a_script_with_its_own_loop(hosts: Hosts, tmp_path: Path) -> None:
    """Two workers die, one of them rank 0; scheduler, counter and evaluations are as
    in an undisturbed script.
    """
    script = [OWN_LOOP, *["--output-dir", "run", "--ledger", "--device", "cpu"]]
    (tmp_path / "alone").mkdir()
    expected = undisturbed(tmp_path / "alone", training=script)
    on_demand.pace(tmp_path, 0.2)
    with job(hosts, tmp_path, training=script) as running:
        running.after(20)
        running.worker("h2").kill()
        running.reaches(3)
        running.worker("h1").kill()
        running.completes(expected)


def newest_commit(run: Path) -> int:
    """Return the step of the newest checkpoint, which must be whole."""
    snapshot = checkpoint.newest_good(run, pytest.fail)
    return snapshot["progress"]["step"] if snapshot else 0


def resumed_at(running: Job) -> int:
    return int(running.output.split("resuming at", 1)[1].splitlines()[0].split("step ")[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_same_command_resumes_on_other_hosts(
    number: signal.Signals, hosts: Hosts, tmp_path: Path, expected: Weights
) -> None:
    """After Ctrl-C or the death of the driver, all workers commit once and end."""
    on_demand.pace(tmp_path, 0.2)  # they notice the death after 10 s
    with job(hosts, tmp_path) as running:
        running.after(20)
        running.driver.send_signal(number)
        if number == signal.SIGINT:
            assert running.launcher.wait(200) == 128 + number, running.output
            assert f"at step {running.steps}, committed" in running.output
        wait_for("the workers to end", lambda: not any(map(hosts.workers, hosts.inits)))
        steps = running.steps
        assert steps < STEPS
    with job(hosts, tmp_path, listed=("h1", "h2")) as running:
        running.completes(expected)
    assert resumed_at(running) == steps


def test_a_job_that_begins_on_the_launchers_host_alone(
    hosts: Hosts, tmp_path: Path, expected: Weights
) -> None:
    """Other hosts join it although its name resolves to 127.0.1.1, interfaces
    differ, and one network is dead.
    """
    on_demand.pace(tmp_path, 0.3)
    hosts.resolve("h1", "h1", "127.0.1.1")  # as Debian's installer does
    for name in ALL:
        hosts.add_network(name, "bridge0", "172.17.0.1/16")
    hosts.rename_network("h3", "enp3s0")
    with job(hosts, tmp_path, listed=("localhost",)) as running:
        running.after(3)
        running.list("localhost", "h2")
        running.reaches(2)
        running.list("h1", "h2", "h3")
        running.reaches(3)
        running.completes(expected)
    assert "could not connect" not in running.output, running.output
    assert "world 1 -> 2 at step" in running.output
    # a host listed by its own name is another one
    assert re.search(r"h1 \(process \d+\)[^;]* came", running.output)


def test_a_newcomer_is_given_a_state_that_takes_long(
    hosts: Hosts, tmp_path: Path, expected: Weights
) -> None:
    """A transfer longer than the operation timeout is no fault; the receiver may die half-way."""
    on_demand.pace(tmp_path, 0.5)
    hosts.limit("h3", megabit=40)
    limit = ["HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS=2"]
    training = arguments(model="tests.support.on_demand:weighty")
    with job(hosts, tmp_path, listed=("h1", "h2"), training=training, environment=limit) as running:
        running.after(5)
        running.list(*ALL)
        wait_for(
            "the line",
            lambda: re.search(r"sending the state, \d+ MB, to 2 ranks", running.output) is not None,
        )
        running.worker("h3").kill()
        running.reaches(3)
        running.completes(expected)
    joined = next(change for change in running.changes if change["world_size"] == 3)
    assert joined["seconds"] > 5  # 26 MB at 40 Mbit/s


def test_a_driver_that_is_out_of_reach_for_a_while(
    hosts: Hosts, tmp_path: Path, expected: Weights
) -> None:
    """A short network failure costs no worker and no step."""
    on_demand.pace(tmp_path, 0.1)
    with job(hosts, tmp_path, listed=("h2", "h3"), training=RARE) as running:
        running.after(8)
        before = [running.worker(name).pid for name in ("h2", "h3")]
        hosts.unplug("h1")
        time.sleep(AWAY_S)
        hosts.plug("h1")
        running.after(running.steps + 10)
        assert [running.worker(name).pid for name in ("h2", "h3")] == before
        assert not running.changes
        running.completes(expected)
    assert "BrokenPipe" not in running.output


def test_the_first_host_powers_off(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """The driver and rank 0 are gone; the same command on another host
    resumes from the last commit.
    """
    on_demand.pace(tmp_path, 0.1)
    with job(hosts, tmp_path, training=OFTEN) as running:
        running.after(30)
        hosts.power_off("h1")
        committed = newest_commit(running.run)
        with job(hosts, tmp_path, listed=("h2", "h3"), training=OFTEN, start_on="h2") as again:
            again.completes(expected)
    assert resumed_at(again) >= committed > 0


def test_a_host_that_gets_sigterm(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """A host whose processes get SIGTERM leaves, rank 0's as well; if all
    hosts get it, the job ends.
    """
    on_demand.pace(tmp_path, 0.1)
    with job(hosts, tmp_path, listed=("h3", "h2", "h1"), training=RARE) as running:
        running.after(10)
        for left, name in enumerate(("h2", "h3"), start=1):  # h3 has rank 0
            steps = running.steps
            hosts.signal_all(name, signal.SIGTERM)
            running.reaches(3 - left)
            wait_for("its commit", lambda least=steps: newest_commit(running.run) >= least)
            wait_for("its worker to end", lambda gone=name: not hosts.workers(gone))
            running.after(running.steps + 5)
        assert not hosts.workers("h3") and not hosts.workers("h2")
        steps = running.steps
        running.worker("h1").send_signal(signal.SIGTERM)
        assert running.launcher.wait(200) == 128 + signal.SIGTERM, running.output
        assert newest_commit(running.run) >= steps
    with job(hosts, tmp_path, training=RARE) as running:
        running.completes(expected)


def test_survivors_that_cannot_connect_commit_and_the_job_ends(
    hosts: Hosts, tmp_path: Path, expected: Weights
) -> None:
    """One line reports it after three attempts; the same command resumes
    when the network is back.
    """
    with job(hosts, tmp_path, training=RARE, environment=LIMIT) as running:
        running.after(15)
        hosts.part("h2", "h3")
        assert running.launcher.wait(200) == 5, running.output
        steps = running.steps
        assert newest_commit(running.run) >= steps
    assert running.output.count("`hvd-train doctor -H h1:1,h2:1,h3:1` examines them") == 1, (
        running.output
    )
    hosts.part("h2", "h3", undo=True)
    with job(hosts, tmp_path, training=RARE) as running:
        running.completes(expected)
    assert resumed_at(running) >= steps

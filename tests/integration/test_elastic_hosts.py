"""Elastic training on three hosts with ssh between them, through everything that can happen to a cluster."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvd_train import checkpoint
from tests.support import hosts as cluster
from tests.support import on_demand
from tests.support.elastic_hosts import ALL, OBEDIENT, ON_HOSTS, STEPS_PER_EPOCH, Job, arguments, job, undisturbed
from tests.support.hosts import Hosts
from tests.support.launching import wait_for
from tests.support.runs import Weights

STEPS = 8 * STEPS_PER_EPOCH

pytestmark = ON_HOSTS


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Return the weights of the undisturbed run of one process."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Run h1, h2 and h3; h4 is a name without a machine."""
    with cluster.hosts(tmp_path / "cluster", 3, names=4) as found:
        yield found


def kill(job: Job, *names: str) -> None:
    """Kill the workers of these hosts at once."""
    for worker in [job.worker(name) for name in names]:
        worker.kill()


def unplug_for_a_while(job: Job) -> None:
    """Cut the network of h2 until the others go on without it."""
    job.hosts.unplug("h2")
    reached = len(job.changes)
    wait_for("the others to go on", lambda: len(job.changes) > reached)
    job.hosts.plug("h2")


def kill_a_survivor(job: Job) -> None:
    """Kill a worker, and another one when it is asked for its digest, or for its part of a commit."""
    on_demand.order(job.folder, "state", "h3", "die")
    kill(job, "h2")


def take_and_add(job: Job) -> None:
    """Replace a host of the list by another."""
    job.hosts.boot("h4")
    job.list("h1", "h3", "h4")


FAULTS: dict[str, Callable[[Job], None]] = {
    "kill": lambda job: kill(job, "h2"),
    "kill rank 0": lambda job: kill(job, "h1"),
    "kill two": lambda job: kill(job, "h1", "h3"),
    "power off": lambda job: job.hosts.power_off("h3"),
    "stop": lambda job: job.worker("h2").send_signal(signal.SIGSTOP),
    "partition": unplug_for_a_while,
    "out and in": take_and_add,
    "rank 0's host is taken from the list": lambda job: job.list("h2", "h3"),
    "unreachable": lambda job: job.list("h1", "h2", "h3", "h4"),
    "abort": lambda job: job.worker("h2").send_signal(signal.SIGABRT),
    "an error in the model": lambda job: on_demand.order(job.folder, "forward", "h2", "an error in somebody's model"),
    "rank 0 misses the end of a step": lambda job: on_demand.order(job.folder, "update", "h1", "lost"),
    "a survivor dies while the others meet": kill_a_survivor,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault(name: str, hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """After a fault no step is lost, each sample counts once per epoch, and the weights are the undisturbed ones."""
    with job(hosts, tmp_path, training=arguments(model=OBEDIENT)) as running:
        running.after(random.Random(name).randint(15, 35))
        FAULTS[name](running)
        running.completes(expected)
    assert running.changes or name in ("out and in", "unreachable")
    assert ("RuntimeError: an error in somebody's model" in running.output) == (name == "an error in the model")
    assert not [path for place in ("forward", "update", "state") for path in tmp_path.glob(f"{place}-h*")], "not obeyed"


def goes_on(hosts: Hosts, folder: Path, expected: Weights, steps: int, listed: tuple[str, ...] = ALL) -> None:
    """Assert that the same command continues at this step and ends as the undisturbed run."""
    with job(hosts, folder, listed=listed) as running:
        running.completes(expected)
    assert f"step {steps}" in running.output.split("going on at", 1)[1].splitlines()[0]


def test_below_the_fewest_and_back(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """With --min-np 3 two survivors wait for a third and go on with it; Horovod deadlocks (issue #3494)."""
    with job(hosts, tmp_path, "--min-np", "3") as running:
        running.after(20)
        running.worker("h2").kill()
        running.completes(expected)
    assert {change["world_size"] for change in running.changes} == {3}


def test_a_newcomer_that_dies_while_it_joins(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """The others do not wait for a newcomer that dies while it joins, and another one takes its place."""
    on_demand.pace(tmp_path, 0.5)
    with job(hosts, tmp_path, listed=("h1", "h2"), training=arguments(model=OBEDIENT)) as running:
        running.after(5)
        running.list(*ALL)
        wait_for("a worker on h3", lambda: hosts.workers("h3"))
        running.worker("h3").kill()
        running.reaches(3)
        on_demand.pace(tmp_path, 0)
        running.completes(expected)


def test_ctrl_c_and_the_same_command_again_on_other_hosts(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """Ctrl-C commits once and leaves no process; the same command continues with another number of workers."""
    with job(hosts, tmp_path) as running:
        running.after(25)
        running.supervisor.send_signal(signal.SIGINT)
        assert running.launcher.wait(200) == 128 + signal.SIGINT, running.output
        steps = running.steps
        assert f"at step {steps}, committed" in running.output
        assert not [name for name in hosts.inits if hosts.workers(name)]
    goes_on(hosts, tmp_path, expected, steps, listed=("h1", "h2"))


def test_a_dead_launcher_leaves_no_orphans(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """After SIGKILL of the launcher the workers of all hosts commit and end, and the same command continues."""
    with job(hosts, tmp_path) as running:
        running.after(20)
        running.supervisor.kill()
        wait_for("the workers to end", lambda: not any(hosts.workers(name) for name in hosts.inits))
        steps = running.steps
        assert steps < STEPS
    goes_on(hosts, tmp_path, expected, steps)


def test_a_dead_driver_is_started_again(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """After SIGKILL of Horovod's launcher the job continues by itself from the last commit."""
    with job(hosts, tmp_path) as running:
        running.after(20)
        running.driver.kill()
        running.completes(expected)
    assert "it goes on from its last commit in 2 s" in running.output


def test_a_newcomer_that_a_member_cannot_reach(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """After three attempts it is left out, in a line that names it, and the others train on without a lost step."""
    on_demand.pace(tmp_path, 0.5)
    hosts.part("h2", "h3")
    limit = ["HOROVOD_GLOO_TIMEOUT_SECONDS=2"]
    training = arguments(model=OBEDIENT)
    with job(hosts, tmp_path, listed=("h1", "h2"), training=training, environment=limit) as running:
        running.after(5)
        running.list(*ALL)
        wait_for("the end of the attempts", lambda: "h3[0] is taken out" in running.output)
        on_demand.pace(tmp_path, 0)
        running.completes(expected)
    assert "the ranks have not met with it, 3 times in a row; it is tried again in 60 s" in running.output
    assert running.output.count("the ranks have not met") == 4, running.output
    assert "Traceback" not in running.output


def test_a_job_that_begins_on_the_launchers_host_alone(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """Other hosts join it though its name leads to 127.0.1.1, interfaces differ, and a network leads nowhere."""
    on_demand.pace(tmp_path, 0.3)
    hosts.resolve("h1", "h1", "127.0.1.1")  # as Debian's installer does
    for name in ALL:
        hosts.add_network(name, "bridge0", "172.17.0.1/16")
    hosts.rename_network("h3", "enp3s0")
    with job(hosts, tmp_path, listed=("localhost",), training=arguments(model=OBEDIENT)) as running:
        running.after(3)
        running.list("localhost", "h2")
        running.reaches(2)
        running.list("h1", "h2", "h3")
        running.reaches(3)
        on_demand.pace(tmp_path, 0)
        running.completes(expected)
    assert "have not met" not in running.output, running.output
    assert "world 1 -> 2 at step" in running.output
    assert re.search(r"h1 \(process \d+\)[^;]* came", running.output), "a host listed by its own name is another one"


def test_a_newcomer_is_given_a_state_that_takes_long(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """It takes longer than an operation may: no fault, no lost step, a line to read; one may die half-way."""
    on_demand.pace(tmp_path, 0.5)
    hosts.limit("h3", megabit=40)
    limit = ["HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS=2"]
    training = arguments(model="tests.support.on_demand:weighty")
    with job(hosts, tmp_path, listed=("h1", "h2"), training=training, environment=limit) as running:
        running.after(5)
        running.list(*ALL)
        wait_for("a part to be sent", lambda: "sending the state to 2 ranks" in running.output)
        running.worker("h3").kill()
        running.reaches(3)
        on_demand.pace(tmp_path, 0)
        running.completes(expected)
    joined = next(change for change in running.changes if change["world_size"] == 3)
    assert joined["seconds"] > 5  # 26 MB at 40 Mbit/s


def test_the_others_train_while_a_newcomer_is_given_the_state(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """If the giver dies meanwhile, another one goes on giving; all of it is used when all of it is there, and exact."""
    on_demand.pace(tmp_path, 0.2)
    hosts.limit("h3", megabit=100)  # 1.4 s a part, so a line tells of it before all is there
    with job(
        hosts, tmp_path, listed=("h1", "h2"), training=arguments(model="tests.support.on_demand:bulky")
    ) as running:
        running.after(5)
        running.list(*ALL)
        wait_for("some parts to arrive", lambda: "handing over the state" in running.output)
        on_demand.order(tmp_path, "build", "h1", "wait 15")  # the two others go on before its successor comes
        running.worker("h1").kill()
        wait_for("all of it", lambda: "newcomers have the state" in running.output)
        on_demand.pace(tmp_path, 0)
        running.completes(expected)
    changes = running.changes
    given = next(number for number, change in enumerate(changes) if change["why"] == "newcomers have the state")
    assert {2, 3} <= {change["world_size"] for change in changes[:given]}, running.output
    assert changes[given]["step"] - changes[0]["step"] >= 7  # 100 MB, 16 MB beside each step
    assert "sending the state" not in running.output


@pytest.mark.parametrize("unfinished", ["checkpoints/*.partial", "model-final.pt.partial"])
def test_rank_0_dies_while_it_writes(unfinished: str, hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """Half a file is no file: another rank takes over the folder and writes whole ones, at the very end, too."""
    training = arguments(model="tests.support.on_demand:heavy")
    run = tmp_path / "run"
    with job(hosts, tmp_path, training=training) as running:
        running.after(15)
        writer = running.worker("h1")

        def caught() -> bool:
            """Stop the worker in the middle of a write; a write that ended before does not count."""
            if list(run.glob(unfinished)):
                writer.suspend()
                if list(run.glob(unfinished)):
                    return True
                writer.resume()
            return False

        wait_for("a file under way", caught, poll_s=0.001)
        writer.kill()
        running.completes(expected)
    assert running.output.count("on digits") == 1, "the survivors had to start again"
    assert not list(run.rglob("*.partial"))
    last = checkpoint.newest_good(tmp_path / "run", pytest.fail)
    assert last is not None
    assert last["progress"]["step"] == STEPS


def test_a_newcomer_that_needs_half_a_minute(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """Nobody waits for a slow newcomer, and it joins when it is ready, later than any limit of a meeting."""
    on_demand.pace(tmp_path, 0.15)
    on_demand.order(tmp_path, "build", "h3", "wait 25")
    with job(hosts, tmp_path, listed=("h1", "h2"), training=arguments(model=OBEDIENT)) as running:
        running.after(5)
        running.list(*ALL)
        wait_for("the newcomer to begin", lambda: on_demand.obeyed(tmp_path, "build", "h3"))
        begun = running.steps
        running.reaches(3)
        on_demand.pace(tmp_path, 0)
        running.completes(expected)
    joined = next(change for change in running.changes if change["world_size"] == 3)
    assert joined["step"] - begun > 40, "the others have not gone on"


def test_a_flapping_host(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """A host may come and go in the list faster than a worker can join, and so may its network."""
    on_demand.pace(tmp_path, 0.2)
    with job(hosts, tmp_path, training=arguments(model=OBEDIENT)) as running:
        running.after(5)
        for _ in range(4):
            running.list("h1", "h2")
            running.after(running.steps + 8)
            running.list(*ALL)
            running.after(running.steps + 8)
        for _ in range(3):
            hosts.unplug("h2")
            hosts.plug("h2")
            running.after(running.steps + 5)
        running.completes(expected)
    assert any("h3" in str(change["left"]) for change in running.changes)


def test_several_workers_on_each_host(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """If one of two workers of a host dies, and then both, each is replaced in its own slot."""
    on_demand.pace(tmp_path, 0.5)
    training = arguments(model=OBEDIENT)
    with job(hosts, tmp_path, listed=("h1 slots=1", "h2 slots=2"), training=training) as running:
        running.after(5)
        hosts.workers("h2")[1].kill()
        running.reaches(2)
        running.reaches(3)
        for worker in hosts.workers("h2"):
            worker.kill()
        wait_for("the fault to be noticed", lambda: len(running.changes) > 2)
        running.reaches(3)
        on_demand.pace(tmp_path, 0)
        running.completes(expected)
    assert 1 in {change["world_size"] for change in running.changes}

"""Elastic training on three hosts with ssh between them, through everything that can happen to a cluster."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvd_train import checkpoint
from tests.support import hosts as cluster
from tests.support import on_demand
from tests.support.elastic_hosts import ALL, OBEDIENT, ON_HOSTS, STEPS_PER_EPOCH, Job, arguments, job, undisturbed
from tests.support.hosts import PROGRAM, Hosts
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


def kill_at_once(*names: str) -> Callable[[Job], None]:
    """Return a fault that kills the workers of these hosts by SIGKILL."""

    def fault(job: Job) -> None:
        workers = [job.worker(name) for name in names]
        for worker in workers:
            worker.kill()

    return fault


def power_off(job: Job) -> None:
    """Kill h3 so that nobody hears of its end."""
    job.hosts.power_off("h3")


def stop(job: Job) -> None:
    """Stop the worker of h2 by SIGSTOP."""
    job.worker("h2").send_signal(signal.SIGSTOP)


def unplug_for_a_while(job: Job) -> None:
    """Cut the network of h2 until the others go on without it."""
    job.hosts.unplug("h2")
    reached = len(job.changes)
    wait_for("the others to go on", lambda: len(job.changes) > reached, limit_s=60)
    job.hosts.plug("h2")


def take_and_add(job: Job) -> None:
    """Replace a host of the list by another."""
    job.hosts.boot("h4")
    job.list("h1", "h3", "h4")


def name_unreachable(job: Job) -> None:
    """Add a host to the list that cannot be reached."""
    job.list("h1", "h2", "h3", "h4")


def raise_in_worker(job: Job) -> None:
    """End the worker of h2 by SIGABRT, as an assertion in native code does."""
    job.worker("h2").send_signal(signal.SIGABRT)


def take_away(job: Job) -> None:
    """Take a host out of the list, the one of rank 0 and the launcher."""
    job.list("h2", "h3")


FAULTS: dict[str, Callable[[Job], None]] = {
    "kill": kill_at_once("h2"),
    "kill rank 0": kill_at_once("h1"),
    "kill two": kill_at_once("h1", "h3"),
    "power off": power_off,
    "stop": stop,
    "partition": unplug_for_a_while,
    "out and in": take_and_add,
    "taken": take_away,
    "unreachable": name_unreachable,
    "abort": raise_in_worker,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault(name: str, hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """After a fault no step is lost, each sample counts once per epoch, and the weights are the undisturbed ones."""
    with job(hosts, tmp_path) as running:
        running.after(random.Random(name).randint(15, 35))
        FAULTS[name](running)
        running.completes(expected)
    assert running.changes or name in ("out and in", "unreachable")


def goes_on(
    hosts: Hosts,
    folder: Path,
    expected: Weights,
    steps: int,
    listed: tuple[str, ...] = ALL,
) -> None:
    """Assert that the same command continues at this step and ends as the undisturbed run."""
    with job(hosts, folder, listed=listed) as running:
        running.completes(expected)
    assert f"step {steps}" in running.output.split("going on at", 1)[1].splitlines()[0]


def survives_two_losses(hosts: Hosts, folder: Path, training: list[str]) -> None:
    """Assert that a training loses a worker, then the one of rank 0, and ends as the undisturbed one does."""
    undisturbed_weights = undisturbed(folder / "undisturbed", training=training)
    with job(hosts, folder, training=training) as running:
        running.after(20)
        kill_at_once("h2")(running)
        running.reaches(2)
        running.after(running.steps + 10)
        kill_at_once("h1")(running)
        running.completes(undisturbed_weights)


def test_a_language_model(hosts: Hosts, tmp_path: Path) -> None:
    """A task of another kind survives its workers, rank 0 among them, as classification does."""
    text = "tests.support.small_text"
    (tmp_path / "undisturbed").mkdir()
    survives_two_losses(hosts, tmp_path, arguments(model=f"{text}:model", data=f"{text}:text --task language-model"))


def test_two_optimizers_in_a_loop_of_its_own(hosts: Hosts, tmp_path: Path) -> None:
    """A program with a session survives its workers, rank 0 among them; the step that they break is undone."""
    for folder in (tmp_path, tmp_path / "undisturbed"):
        folder.mkdir(exist_ok=True)
        (folder / PROGRAM).write_text("from tests.support import own_loops\n\nown_loops.main()\n")
    survives_two_losses(hosts, tmp_path, ["python", PROGRAM, "8"])


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
        assert running.launcher.wait(60) == 128 + signal.SIGINT, running.output
        steps = running.steps
        assert f"at step {steps}, committed" in running.output
        assert not [name for name in hosts.inits if hosts.workers(name)]
    goes_on(hosts, tmp_path, expected, steps, listed=("h1", "h2"))


def test_a_dead_launcher_leaves_no_orphans(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """After SIGKILL of the launcher the workers of all hosts commit and end, and the same command continues."""
    with job(hosts, tmp_path) as running:
        running.after(20)
        running.supervisor.kill()
        wait_for("the workers to end", lambda: not any(hosts.workers(name) for name in hosts.inits), limit_s=60)
        steps = running.steps
        assert steps < STEPS
    goes_on(hosts, tmp_path, expected, steps)


def test_a_dead_driver_is_started_again(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """After SIGKILL of Horovod's launcher the job continues by itself from the last commit."""
    with job(hosts, tmp_path) as running:
        running.after(20)
        running.driver.kill()
        running.completes(expected, 300)
    assert "it goes on from its last commit in 2 s" in running.output


def test_a_survivor_dies_while_the_others_meet_again(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """After a second fault during recovery the last survivor goes on, and the others come back."""
    training = arguments(model=OBEDIENT)
    with job(hosts, tmp_path, training=training) as running:
        running.after(20)
        on_demand.order(tmp_path, "state", "h3", "die")  # asked for its digest, or for its part of a commit
        running.worker("h2").kill()
        running.completes(expected)
    assert on_demand.obeyed(tmp_path, "state", "h3")


def test_a_newcomer_that_a_member_cannot_reach(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """After three attempts it is left out, in a line that names it, and the others train on without a lost step."""
    on_demand.pace(tmp_path, 0.5)
    hosts.part("h2", "h3")
    limit = ["HOROVOD_GLOO_TIMEOUT_SECONDS=2"]
    training = arguments(model=OBEDIENT)
    with job(hosts, tmp_path, listed=("h1", "h2"), training=training, environment=limit) as running:
        running.after(5)
        running.list(*ALL)
        wait_for("the end of the attempts", lambda: "h3[0] is taken out" in running.output, limit_s=120)
        on_demand.pace(tmp_path, 0)
        running.completes(expected)
    assert "the ranks have not met with it, 3 times in a row; it is tried again in 60 s" in running.output
    assert running.output.count("the ranks have not met") == 4, running.output
    assert "Traceback" not in running.output


def test_a_job_that_begins_on_the_launchers_host_alone(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """Other hosts join it, whatever the launcher's host is called, whatever its name leads to there.

    The hosts have a second network each, with one address on all, and their interfaces have different names.
    """
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


def test_a_rank_that_is_a_step_behind(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """Rank 0 that has missed the end of a step takes the others' state and writes that step down."""
    with job(hosts, tmp_path, training=arguments(model=OBEDIENT)) as running:
        running.after(20)
        on_demand.order(tmp_path, "update", "h1", "lost")
        running.completes(expected)
    assert on_demand.obeyed(tmp_path, "update", "h1")
    assert running.changes


def test_a_newcomer_is_given_a_state_that_takes_long(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """It takes longer than an operation may, and no longer than its bytes need: no fault, no lost step, a line to read.

    If a newcomer dies half-way, the others go on, and another one takes its place.
    """
    on_demand.pace(tmp_path, 0.5)
    hosts.limit("h3", megabit=40)
    limit = ["HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS=2"]
    training = arguments(model="tests.support.on_demand:weighty")
    with job(hosts, tmp_path, listed=("h1", "h2"), training=training, environment=limit) as running:
        running.after(5)
        running.list(*ALL)
        wait_for("a part to be sent", lambda: "sending the state to 2 ranks" in running.output, limit_s=150)
        running.worker("h3").kill()
        running.reaches(3)
        on_demand.pace(tmp_path, 0)
        running.completes(expected)
    (joined,) = [change for change in running.changes if change["world_size"] == 3]
    assert joined["why"] == "hosts came or went"
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
        wait_for("some parts to arrive", lambda: "handing over the state" in running.output, limit_s=150)
        on_demand.order(tmp_path, "build", "h1", "wait 15")  # the two others go on before its successor comes
        running.worker("h1").kill()
        wait_for("all of it", lambda: "newcomers have the state" in running.output, limit_s=150)
        on_demand.pace(tmp_path, 0)
        running.completes(expected)
    changes = running.changes
    given = next(number for number, change in enumerate(changes) if change["why"] == "newcomers have the state")
    assert [change["world_size"] for change in changes[:2]] == [3, 2], running.output
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

        wait_for("a file under way", caught, limit_s=120, poll_s=0.001)
        writer.kill()
        running.completes(expected)
    assert running.output.count("on digits") == 1, "the survivors had to start again"
    assert "nothing was heard" not in running.output, "giving 100 MB to a newcomer kept the ranks from all else"
    assert not list(run.rglob("*.partial"))
    last = checkpoint.newest_good(tmp_path / "run", pytest.fail)
    assert last is not None
    assert last["progress"]["step"] == STEPS


def test_a_worker_that_raises(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """The traceback of a worker is shown, the others go on, and it is started again."""
    training = arguments(model=OBEDIENT)
    with job(hosts, tmp_path, training=training) as running:
        running.after(20)
        on_demand.order(tmp_path, "forward", "h2", "an error in somebody's model")
        running.completes(expected)
    assert "RuntimeError: an error in somebody's model" in running.output
    assert 2 in {change["world_size"] for change in running.changes}


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
    (joined,) = running.changes
    assert joined["step"] - begun > 40, "the others have not gone on"
    assert (joined["previous_size"], joined["world_size"]) == (2, 3)


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
        for _ in range(5):
            hosts.unplug("h2")
            time.sleep(0.5)
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

"""A campaign of random faults on three hosts: `make campaign`, for a given time, from a seed."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import hosts as cluster
from tests.support import on_demand
from tests.support.elastic_hosts import ALL, OBEDIENT, STEPS_PER_EPOCH, Job, arguments, check, job, undisturbed
from tests.support.hosts import Hosts
from tests.support.launching import wait_for

SECONDS = float(os.environ.get("CAMPAIGN_SECONDS", "1800"))
SEED = int(os.environ.get("CAMPAIGN_SEED", "0"))
EPOCHS = 20
LAUNCHER = "h4"
NO_HOSTS = cluster.missing()

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(int(SECONDS) + 900),
    pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "-"),
]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Run h1, h2 and h3 for workers, all of them mortal; the launcher is on h4, which keeps its power."""
    with cluster.hosts(tmp_path / "cluster", 4, names=4) as found:
        yield found


def kill(running: Job, chance: random.Random) -> None:
    """Kill one worker, or two at once, by SIGKILL."""
    for host in chance.sample(ALL, chance.choice((1, 1, 2))):
        for worker in running.hosts.workers(host):
            worker.kill()


def kill_twice(running: Job, chance: random.Random) -> None:
    """Kill one worker, and another while the others recover or the first comes back."""
    for host in chance.sample(ALL, 2):
        for worker in running.hosts.workers(host):
            worker.kill()
        time.sleep(chance.uniform(0, 3))


def stop(running: Job, chance: random.Random) -> None:
    """Stop a worker by SIGSTOP, for a while or for good."""
    for worker in running.hosts.workers(chance.choice(ALL)):
        worker.send_signal(signal.SIGSTOP)
        if chance.random() < 0.5:
            time.sleep(chance.uniform(0.5, 12))
            if worker.is_running():
                worker.send_signal(signal.SIGCONT)


def abort(running: Job, chance: random.Random) -> None:
    """Crash a worker as native code does, by SIGABRT."""
    for worker in running.hosts.workers(chance.choice(ALL)):
        worker.send_signal(signal.SIGABRT)


def lose_host(running: Job, chance: random.Random) -> None:
    """Kill a host, with its connections closed or silent, and start it again after a while."""
    host = chance.choice(ALL)
    chance.choice((running.hosts.kill, running.hosts.power_off))(host)
    time.sleep(chance.uniform(0, 10))
    running.hosts.boot(host)


def unplug(running: Job, chance: random.Random) -> None:
    """Cut a host's network for a while."""
    host = chance.choice(ALL)
    running.hosts.unplug(host)
    time.sleep(chance.uniform(0.2, 12))
    running.hosts.plug(host)


def unplug_driver(running: Job, chance: random.Random) -> None:
    """Cut the network of the launcher's host for less time than that in which workers take it for dead."""
    running.hosts.unplug(LAUNCHER)
    time.sleep(chance.uniform(0.2, 7))
    running.hosts.plug(LAUNCHER)


def tell_to_go(running: Job, chance: random.Random) -> None:
    """Send SIGTERM to all processes of a host, as before a spot host goes, and list it anew after a while."""
    host = chance.choice(ALL)
    running.hosts.signal_all(host, signal.SIGTERM)
    time.sleep(chance.uniform(2, 6))
    running.list(*(other for other in ALL if other != host))
    time.sleep(chance.uniform(2, 6))
    running.list(*ALL)


def relist(running: Job, chance: random.Random) -> None:
    """Take hosts out of the list, and put them back after a while."""
    running.list(*chance.sample(ALL, chance.choice((1, 2))))
    time.sleep(chance.uniform(0.2, 10))
    running.list(*ALL)


FAULTS: list[Callable[[Job, random.Random], None]] = [
    *(kill, kill_twice, stop, abort, lose_host, unplug, unplug_driver, tell_to_go, relist),
]


def test_campaign(hosts: Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After any faults that leave a worker, no step is lost, each sample counts once, and weights are undisturbed."""
    chance = random.Random(SEED)
    (tmp_path / "undisturbed").mkdir()
    expected = undisturbed(tmp_path / "undisturbed", EPOCHS)
    end = time.monotonic() + SECONDS
    faults: Counter[str] = Counter()
    seconds, sizes, trainings = [], Counter[int](), 0
    while time.monotonic() < end:
        folder = tmp_path / str(trainings)
        folder.mkdir()
        history = []
        on_demand.pace(folder, 0.2)
        with job(hosts, folder, training=arguments(EPOCHS, OBEDIENT), start_on=LAUNCHER) as running:
            running.after(3)
            while running.launcher.poll() is None:
                fault = chance.choice(FAULTS)
                history.append(fault.__name__)
                fault(running, chance)
                whole_or_over(running)
        failed = f"training {trainings} of seed {SEED}, after {history}: {folder}"
        assert running.launcher.returncode == 0, f"{failed}\n{running.output}"
        check(running, expected, EPOCHS)
        faults.update(history)
        seconds += [change["seconds"] for change in running.changes]
        sizes.update(change["world_size"] for change in running.changes)
        trainings += 1
        with capsys.disabled():
            print(f"\ntraining {trainings}: {', '.join(history)}; {len(running.changes)} worlds", flush=True)
    with capsys.disabled():
        print(
            f"\ncampaign of seed {SEED}: {trainings} trainings of {STEPS_PER_EPOCH * EPOCHS} steps "
            f"through {faults.total()} faults"
        )
        print(f"  {', '.join(f'{count} {name}' for name, count in faults.most_common())}")
        print(f"  {len(seconds)} changes of world, to {dict(sizes)} workers; from a fault that was noticed to the next")
        print(f"  step {statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s (longest); steps lost: 0")


def whole_or_over(running: Job) -> None:
    """Wait until three workers have trained for a few steps, or the training is over."""
    begun = running.steps

    def ready() -> bool:
        if running.launcher.poll() is not None:
            return True
        return running.steps >= begun + 5 and [3, *(change["world_size"] for change in running.changes)][-1] == 3

    wait_for("the world to be whole", ready, limit_s=180)

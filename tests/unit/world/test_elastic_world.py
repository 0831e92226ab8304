"""How a worker of an elastic job goes on from world to world, with Horovod's start and end as data."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
from horovod.common.elastic import notification_manager

from hvd_train.errors import RankLost
from hvd_train.world import cores, elastic_world, heartbeat, horovod_world
from hvd_train.world.cores import Cores
from hvd_train.world.elastic_world import ElasticWorld
from hvd_train.world.horovod_world import HorovodInternalError
from hvd_train.world.world import DriverLost, Place, WorldChanged


class Optimizer:
    """Counts the broken steps that it forgets, and how often its weights have become this rank's own again."""

    forgotten = parted = 0

    def forget_step(self) -> None:
        self.forgotten += 1

    def part(self) -> None:
        self.parted += 1


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Place | Exception]]:
    """What each start of Horovod returns or raises; all of them must be used, and no attempt waits for the next."""
    places: list[Place | Exception] = []

    def start() -> Place:
        place = places.pop(0)
        if isinstance(place, Exception):
            raise place
        return place

    for name in ("HOROVOD_DISABLE_GROUP_FUSION", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"):
        monkeypatch.setenv(name, "set by a test")
    monkeypatch.setenv("HVD_TRAIN_SLOT", "1")
    monkeypatch.setattr(horovod_world, "start", start)
    monkeypatch.setattr(horovod_world, "stop", lambda: None)
    monkeypatch.setattr(cores, "of_this_process", lambda: Cores("host", tuple(range(12))))
    monkeypatch.setattr(ElasticWorld, "gather", lambda world, value: [value] * world.place.size)
    slept: list[float] = []
    monkeypatch.setattr(elastic_world.time, "sleep", slept.append)
    yield places
    assert places == []
    assert all(0 < seconds <= 2 for seconds in slept)


def test_before_the_ranks_meet_a_worker_knows_its_slot(
    starts: list[Place | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decides the GPU, for life: Horovod may number the ranks of a host anew. Cores are shared with its host's."""
    monkeypatch.delenv("HOROVOD_LOCAL_SIZE", raising=False)
    world = ElasticWorld()
    assert (world.place.local_rank, world.place.local_size, world.place.size) == (1, 1, 1)
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "4")
    assert ElasticWorld().place.local_size == 4
    starts.append(Place(2, 3, 0, 1, 2))
    assert world.run(lambda: world.place) == Place(2, 3, 1, 1, 2, num_cores=4)


def test_in_each_world_the_ranks_share_the_cores_anew(starts: list[Place | Exception]) -> None:
    """Before they come to one state: with fewer ranks on its host there are more cores for each."""
    world, faults, seen = ElasticWorld(), [RankLost("gone")], []
    starts += [Place(0, 4), Place(0, 2)]
    world.run(lambda: faults and (_ for _ in ()).throw(faults.pop()), lambda: seen.append(world.place.num_cores))
    assert seen == [3, 6]


def test_a_fault_and_a_change_lead_into_the_next_world(starts: list[Place | Exception]) -> None:
    """In each the ranks first come to one state, with weights of their own; only a fault leaves a broken step."""
    world, optimizer, synced = ElasticWorld(), Optimizer(), []
    world._optimizers[None] = optimizer  # type: ignore[index, assignment]
    errors: list[Exception] = [RankLost("gone"), HorovodInternalError("gone"), WorldChanged()]
    starts += [Place(0, 4), Place(0, 3), Place(0, 2), Place(0, 3)]

    def body() -> str:
        if errors:
            raise errors.pop(0)
        return "trained"

    assert world.run(body, lambda: synced.append(world.place.size)) == "trained"
    assert (synced, optimizer.forgotten, optimizer.parted) == ([4, 3, 2, 3], 2, 3)


def test_a_worker_finds_its_driver_and_then_its_way_to_the_others(
    starts: list[Place | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver before the first word to it, the way before each start of Horovod, which reads it then.

    Before all this nobody else uses the slot and its GPU any more.
    """
    calls: list[str] = []
    monkeypatch.setattr(elastic_world.orphans, "kill_predecessor", lambda environ: calls.append("alone"))
    monkeypatch.setattr(elastic_world.addresses, "find_driver", lambda environ: calls.append("driver"))
    monkeypatch.setattr(
        heartbeat, "Heartbeat", lambda environ, real=heartbeat.Heartbeat: calls.append("beat") or real({})
    )
    monkeypatch.setattr(heartbeat, "choose_interface", lambda environ: calls.append("way"))
    monkeypatch.setattr(horovod_world, "start", lambda: calls.append("start") or starts.pop(0))
    starts += [Place(0, 3), Place(0, 2)]
    faults = [RankLost("gone")]
    ElasticWorld().run(lambda: faults and (_ for _ in ()).throw(faults.pop()))
    assert calls == ["alone", "driver", "beat", *["way", "start"] * 2]


def test_a_fault_while_the_ranks_come_to_one_state_is_survived(starts: list[Place | Exception]) -> None:
    """The body has not begun; all meet once more."""
    world, faults = ElasticWorld(), [RankLost("gone")]
    starts += [Place(0, 3), Place(0, 2)]

    def sync() -> None:
        if faults:
            raise faults.pop()

    assert world.run(lambda: world.place.size, sync) == 2


def test_a_driver_that_cannot_be_reached_is_tried_five_times(starts: list[Place | Exception]) -> None:
    """Then the other ranks are lost; under Horovod's own driver also where they do not come."""
    starts += [ValueError("nobody\ncame"), OSError("no driver"), Place(0, 2)]
    assert ElasticWorld().run(lambda: "trained") == "trained"
    starts += [ValueError("nobody came")] * 5
    with pytest.raises(RankLost, match="cannot meet the other ranks: nobody came"):
        ElasticWorld().run(lambda: "never")


def test_a_meeting_that_has_failed_is_left_before_the_next(
    starts: list[Place | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else ranks that connected half would wait in it; a driver that is out of reach is given a second."""
    calls: list[str | float] = []
    monkeypatch.setattr(horovod_world, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(elastic_world.time, "sleep", calls.append)
    starts += [ValueError("nobody came"), OSError("no driver"), Place(0, 2)]
    ElasticWorld().run(lambda: calls.append("trains"))
    assert calls == ["stop", "stop", 1.0, "trains"]


def test_how_often_ranks_try_to_meet_is_for_our_driver_to_say(
    starts: list[Place | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears why they have not met, be it that they did not connect or that the state did not arrive."""
    told: list[str] = []

    def announce(environ: object, silent_since: float, not_met: str) -> bool:
        told.append(not_met)
        return True

    monkeypatch.setattr(heartbeat, "announce_rejoining", announce)
    starts += [*[ValueError("nobody\ncame\nat all")] * 7, Place(0, 2), Place(0, 2), Place(0, 1)]
    faults: list[Exception] = [RankLost("too slow")]

    def sync() -> None:
        if faults:
            raise faults.pop()

    changes = [WorldChanged()]

    def body() -> None:
        if changes:
            raise changes.pop()

    ElasticWorld().run(body, sync)
    assert told == [*["nobody"] * 7, "too slow", ""]


def test_a_worker_asks_for_its_first_rank_and_announces_that_it_rejoins(
    starts: list[Place | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is asked for when all is built, with the facts of this process; later ones by Horovod's core."""
    asked: list[object] = []
    monkeypatch.setattr(heartbeat, "wait_for_first_rank", lambda environ, facts: asked.append(facts))
    monkeypatch.setattr(heartbeat, "announce_rejoining", lambda environ, silent_since, not_met: asked.append("rejoins"))
    errors: list[Exception] = [WorldChanged(), WorldChanged()]
    starts += [Place(0, 2), Place(0, 3), Place(0, 2)]

    def body() -> None:
        if errors:
            raise errors.pop()

    ElasticWorld({"torch": "2.15"}).run(body)
    assert asked == [{"torch": "2.15"}, "rejoins", "rejoins"]


def test_a_change_is_requested_until_the_ranks_meet(starts: list[Place | Exception]) -> None:
    """By Horovod's driver or by ours; a stop goes before a change."""
    world = ElasticWorld()
    requests = []
    starts += [Place(0, 2), Place(0, 3)]

    def body() -> None:
        requests.append(world.requested())
        if len(requests) == 1:
            notification_manager.handle_hosts_updated(1, None)
            requests.append(world.requested())
            raise WorldChanged

    world.run(body)
    assert requests == ["train", "change", "train"]
    assert world._state is not None
    world._heartbeat.requested, world._state.hosts_changed = "stop", True
    assert world.requested() == "stop"


def test_an_error_of_the_body_ends_the_run(starts: list[Place | Exception]) -> None:
    """Only a lost rank and a change of world lead into another world."""
    starts.append(Place(0, 2))
    with pytest.raises(KeyError):
        ElasticWorld().run(lambda: {}["missing"])


def test_a_change_that_has_happened_is_not_requested_again(starts: list[Place | Exception]) -> None:
    """What the driver has asked for with the last heartbeat is fulfilled when the ranks meet."""
    world, requests = ElasticWorld(), list[str]()
    starts += [Place(0, 2), Place(0, 3)]

    def body() -> None:
        requests.append(world.requested())
        if len(requests) == 1:
            world._heartbeat.requested = "change"
            requests.append(world.requested())
            raise WorldChanged

    world.run(body)
    assert requests == ["train", "change", "train"]


def test_a_core_that_waits_for_a_dead_driver_is_left_behind(
    starts: list[Place | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod's own request for a rank has no time limit; what is trained can still be committed, and nobody waits."""
    never, stopped, threads = threading.Event(), list[str](), list[threading.Thread]()

    def start() -> Place:
        threads.append(threading.current_thread())
        never.wait(20)
        raise AssertionError("the driver has answered after all")

    monkeypatch.setattr(horovod_world, "start", start)
    monkeypatch.setattr(horovod_world, "stop", lambda: stopped.append("stopped"))
    monkeypatch.setattr(elastic_world, "_DRIVER_CHECK_S", 0.01)
    world = ElasticWorld()
    monkeypatch.setattr(type(world._heartbeat), "driver_gone", True)
    with pytest.raises(DriverLost, match="the driver is gone"):
        world.run(lambda: "never")
    world.close()
    assert stopped == []
    never.set()
    assert [(thread.daemon, thread.name) for thread in threads] == [(True, "meeting")], "the process ends without it"


def test_one_without_which_the_job_goes_on_leaves(
    starts: list[Place | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod's core raises SystemExit where there is no rank for it."""
    monkeypatch.setattr(horovod_world, "start", lambda: sys.exit(0))
    with pytest.raises(SystemExit):
        ElasticWorld().run(lambda: "never")


def test_a_signal_is_passed_on_to_the_driver(starts: list[Place | Exception]) -> None:
    """Without one of ours it stops all."""
    world = ElasticWorld()
    assert world.requested() == "train"
    assert world.requested(told_to_end=True) == "stop"


def test_a_worker_leaves_its_world_before_it_asks_for_the_next(
    starts: list[Place | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for it otherwise. When it trains no more it may take its time to write; what it holds ends last."""
    calls: list[str] = []
    monkeypatch.setattr(horovod_world, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(heartbeat, "announce_rejoining", lambda environ, silent_since, not_met: calls.append("ask"))
    for name in ("training_left", "all_written"):
        monkeypatch.setattr(heartbeat.Heartbeat, name, lambda beat, name=name: calls.append(name))
    world, changes = ElasticWorld(), [WorldChanged()]
    starts += [Place(0, 2), Place(0, 3)]

    def body() -> None:
        calls.append("train")
        if changes:
            raise changes.pop()

    world.run(body)
    world.close()
    assert calls == ["train", "stop", "ask", "train", "training_left", "all_written", "stop"]


def test_a_worker_that_fails_frees_the_others_at_once(
    starts: list[Place | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for its process to end, and it may have much to write."""
    calls: list[str] = []
    monkeypatch.setattr(horovod_world, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(heartbeat.Heartbeat, "training_left", lambda beat: calls.append("training_left"))
    starts.append(Place(0, 2))
    with pytest.raises(KeyError):
        ElasticWorld().run(lambda: {}["missing"])
    assert calls == ["stop", "training_left"]

"""How an elastic worker continues in the next world; Horovod is simulated."""

import threading
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from hvd_train.errors import RankLost
from hvd_train.world import elastic_world, horovod_world
from hvd_train.world.elastic_world import ElasticWorld
from hvd_train.world.horovod_world import HorovodInternalError
from hvd_train.world.world import Place

Starts = list[Place]


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> Iterator[Starts]:
    """The place that each start of Horovod returns; the test must use all of them."""
    places: Starts = []
    for name in ("HOROVOD_DISABLE_GROUP_FUSION", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "NCCL_RUNTIME_CONNECT"):
        monkeypatch.setenv(name, "set by a test")
    monkeypatch.setenv("HVD_TRAIN_SLOT", "1")
    for question in ("wait_for_first_rank", "announce_rejoining"):
        monkeypatch.setattr(elastic_world, question, lambda *_: None)
    for question in ("get", "choose_interface"):
        monkeypatch.setattr(elastic_world.client, question, lambda *_: None)
    monkeypatch.setenv(elastic_world.WORKER, "1007")
    monkeypatch.setattr(elastic_world.Heartbeat, "start", lambda *_: None)
    monkeypatch.delenv("HOROVOD_LOCAL_SIZE", raising=False)
    monkeypatch.setattr(horovod_world, "start", lambda: places.pop(0))
    monkeypatch.setattr(horovod_world, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(elastic_world.time, "sleep", lambda seconds: None)
    yield places
    assert places == []


def test_a_worker_keeps_its_slot_and_so_its_gpu(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod may number the ranks of a host differently in each world."""
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "4")
    world = ElasticWorld()
    assert (world.place.local_rank, world.place.local_size, world.place.size) == (1, 4, 1)
    starts.append(Place(2, 3, 0, 1, 2))
    world.meet()
    assert world.place == Place(2, 3, 1, 1, 2)


def test_a_fault_and_a_change_lead_into_the_next_world(starts: Starts) -> None:
    """The ranks synchronize the state in each world."""
    world, synced = ElasticWorld(), list[int]()
    starts += [Place(0, 4), Place(0, 3), Place(0, 2), Place(0, 3), Place(0, 5)]
    faults = [None, RankLost("gone"), HorovodInternalError("gone"), None, None]

    def sync() -> None:
        synced.append(world.place.size)
        if (fault := faults.pop(0)) is not None:
            raise fault

    world.meet(sync)
    world.meet(sync, RankLost("gone"))
    world.meet(sync)
    assert synced == [4, 3, 2, 3, 5]


def test_a_request_for_a_rank_that_gets_no_answer_is_abandoned(
    starts: Starts, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod's own request has no time limit; the process commits and ends."""
    never, threads = threading.Event(), list[threading.Thread]()
    start = Mock(side_effect=lambda: [threads.append(threading.current_thread()), never.wait(250)])
    monkeypatch.setattr(horovod_world, "start", start)
    monkeypatch.setattr(elastic_world, "_DRIVER_CHECK_S", 0.01)
    world = ElasticWorld()
    monkeypatch.setattr(type(world._heartbeat), "driver_gone", True)
    with pytest.raises(RankLost, match="the driver is gone"):
        world.meet()
    world.close()
    assert calls == []
    never.set()
    assert all(thread.daemon for thread in threads)

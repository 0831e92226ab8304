"""How an elastic worker gets its ranks in one world after another; Horovod is simulated."""

import os
from collections.abc import Iterator
from unittest.mock import Mock, patch

import pytest

from hvd_train.errors import RankLost
from hvd_train.world import elastic_world, horovod_world
from hvd_train.world.elastic_world import ElasticWorld
from hvd_train.world.horovod_world import HorovodInternalError
from hvd_train.world.world import Place

Starts = list[Place]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    """The place that each start of Horovod returns; the test must use all of them."""
    places = []
    for name in ("wait_for_first_rank", "Heartbeat", "client", "interfaces", "time"):
        monkeypatch.setattr(elastic_world, name, Mock())
    monkeypatch.setattr(horovod_world, "start", lambda: places.pop(0))
    monkeypatch.setattr(horovod_world, "stop", lambda: None)
    own = {"HVD_TRAIN_SLOT": "1", "HOROVOD_LOCAL_RANK": "0", elastic_world.WORKER: "1007"}
    with patch.dict(os.environ, own):  # a world sets variables
        os.environ.pop("HOROVOD_LOCAL_SIZE", None)
        yield places
    assert places == []


def test_a_worker_keeps_its_slot_and_so_its_gpu(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod may number the ranks of a host differently in each world."""
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "4")
    world = ElasticWorld()
    assert (world.place.local_rank, world.place.local_size, world.place.size) == (1, 4, 1)
    starts.append(Place(2, 3, 0, 1))
    world.meet()
    assert world.place == Place(2, 3, 1, 1)


@pytest.mark.parametrize(("wait_s", "limit"), [(600.0, "780"), (0.0, "180")])
def test_ranks_wait_longer_if_one_may_wait_for_data(
    wait_s: float, limit: str, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that fails for minutes is no hang; the limit of the user holds."""
    name = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
    monkeypatch.setenv(name, "of the user")
    world = ElasticWorld()
    world.allow_wait(wait_s)
    assert os.environ[name] == "of the user"
    monkeypatch.delenv(name)
    world.allow_wait(wait_s)
    starts.append(Place(0, 2, 0, 1))
    world.meet()
    assert os.environ[name] == limit


def test_a_fault_and_a_change_lead_into_the_next_world(starts: Starts) -> None:
    """The ranks synchronize the state in each world."""
    world = ElasticWorld()
    synced = []
    starts += [Place(0, 4), Place(0, 3), Place(0, 2), Place(0, 3), Place(0, 5)]
    faults = [None, RankLost("gone"), HorovodInternalError("gone"), None, None]

    def sync():
        synced.append(world.place.size)
        if (fault := faults.pop(0)) is not None:
            raise fault

    world.meet(sync)
    world.meet(sync, RankLost("gone"))
    world.meet(sync)
    assert synced == [4, 3, 2, 3, 5]
    assert os.environ["HOROVOD_LOCAL_RANK"] == "1007", (
        "Horovod's core asks with the number, which no other worker has"
    )

"""How a rank of a launched world starts: whom it finds, who calls the roll, and which place it has."""

from __future__ import annotations

import os
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import client, mpi_roll_call, roll_call, signature, slurm
from hvd_train.world import cores, horovod_world, mpi
from hvd_train.world.cores import Cores
from hvd_train.world.horovod_world import HorovodWorld, RankGroup, hvd
from hvd_train.world.world import Place
from tests.unit.world.test_horovod_world import FourRanks


def under_srun(monkeypatch: pytest.MonkeyPatch, address: str, port: int, rank: int) -> dict[str, str]:
    """Let srun alone have started this rank; what a launcher would have put into the environment."""
    variables = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(rank + 1),
    }
    for name in variables:
        monkeypatch.setenv(name, "before")
    monkeypatch.setenv(signature.KEY, "")
    monkeypatch.setenv("XDG_CACHE_HOME", os.getcwd())
    monkeypatch.setattr(slurm, "variables", lambda environ: variables)
    return variables


def test_a_port_that_is_in_use_under_srun_is_said_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs on a node may come to one port; the other ranks of this one need not wait until their patience ends."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        under_srun(monkeypatch, "localhost", port, rank=0)
        with pytest.raises(UsageError, match=rf"port {port}, .* export {slurm.PORT}=N"):
            horovod_world._rendezvous_of_srun()
        under_srun(monkeypatch, "localhost", port, rank=1)
        with pytest.raises(UsageError, match=rf"port {port}, .* export {slurm.PORT}=N"):
            horovod_world._rendezvous_of_srun()


def test_a_rank_under_srun_alone_finds_the_rendezvous_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod reads from the environment what a launcher would have put there, once somebody serves the port."""
    variables = under_srun(monkeypatch, "node1", 12345, rank=3)
    awaited: list[object] = []
    monkeypatch.setattr(slurm, "find_rank_0", awaited.append)
    assert horovod_world._rendezvous_of_srun() is None
    assert awaited == [os.environ]
    assert {name: os.environ[name] for name in variables} == variables


def test_rank_0_under_srun_alone_serves_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the port that the other ranks know, until it leaves."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    under_srun(monkeypatch, "localhost", port, rank=0)
    before = {*threading.enumerate()}
    server = horovod_world._rendezvous_of_srun()
    assert server is not None
    try:
        assert all(thread.daemon for thread in {*threading.enumerate()} - before), "a rank that fails ends"
        place = {client.ADDRESS: "127.0.0.1", client.PORT: str(port), signature.KEY: os.environ[signature.KEY]}
        client.put(place, "global/1", "where rank 1 is", 10)
        assert client.get(place, "global/1", 10) == "where rank 1 is"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def meets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Notes who calls the roll, with what; Horovod's own start gives rank 1 of two."""
    noted: list[Any] = []
    for name, value in {
        "HOROVOD_DISABLE_GROUP_FUSION": "set by a test",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "set by a test",
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "alone", lambda environ: False)
    monkeypatch.setattr(roll_call, "store", lambda environ: "the store" if environ is os.environ else None)
    monkeypatch.setattr(roll_call, "call", lambda *told: noted.append(told))
    monkeypatch.setattr(mpi, "leave_quickly", lambda environ: noted.append("quickly" if environ is os.environ else ""))
    monkeypatch.setattr(mpi, "call_roll", lambda facts: noted.append(facts) or "MPI")
    monkeypatch.setattr(horovod_world, "start", lambda: noted.append("start") or Place(1, 2, 1, 2, 0))
    monkeypatch.setattr(cores, "of_this_process", lambda: Cores("host", tuple(range(6))))
    monkeypatch.setattr(HorovodWorld, "gather", lambda world, value: [value] * world.place.size)
    return noted


@pytest.mark.parametrize("built", [False, True])
def test_ranks_call_the_roll_before_horovod_starts(
    meets: list[Any], monkeypatch: pytest.MonkeyPatch, built: bool
) -> None:
    """With its own number, the number of all and its facts: by the launcher's store, unless all meet over MPI."""
    monkeypatch.setattr(mpi_roll_call, "meets_over_mpi", lambda environ: environ is os.environ)
    monkeypatch.setattr(hvd, "mpi_built", lambda: built)
    world = HorovodWorld(facts={"torch": "2.15"})
    by_mpi = ["quickly", {"torch": "2.15"}]
    assert meets == [*(by_mpi if built else [("the store", 1, 2, {"torch": "2.15"}, os.environ)]), "start"]
    assert world.place == Place(1, 2, 1, 2, 0, num_cores=3)
    assert world._mpi == ("MPI" if built else None)


def test_the_parts_of_a_job_compare_what_they_run(meets: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the communicator that they share, before Horovod starts among them."""
    monkeypatch.setattr(mpi_roll_call, "call", lambda *told: meets.append(told))
    monkeypatch.setattr(horovod_world, "start", lambda communicator: meets.append(communicator) or Place(0, 2, 0, 2, 0))
    HorovodWorld(RankGroup("half of them", local_rank=2, local_size=4, num_cores=3), {"torch": "2.15"})
    assert meets == [("half of them", {"torch": "2.15"}), "half of them"]


def test_ranks_without_a_store_meet_in_horovod(meets: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the ranks of an elastic job do, which come and go."""
    monkeypatch.setattr(mpi_roll_call, "meets_over_mpi", lambda environ: False)
    monkeypatch.setattr(hvd, "mpi_built", lambda: True)
    monkeypatch.setattr(roll_call, "store", lambda environ: None)
    HorovodWorld()
    assert meets == ["start"]


@pytest.mark.parametrize("alone", [False, True])
def test_what_slurm_says_is_known_before_the_roll_is_called(
    meets: list[Any], monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """Where srun alone has started the ranks; rank 0 serves their rendezvous until it leaves its world."""
    rendezvous = SimpleNamespace(shutdown=lambda: meets.append("served"))
    monkeypatch.setattr(slurm, "alone", lambda environ: alone and environ is os.environ)
    monkeypatch.setattr(horovod_world, "_rendezvous_of_srun", lambda: meets.append("slurm") or rendezvous)
    monkeypatch.setattr(mpi_roll_call, "meets_over_mpi", lambda environ: False)
    monkeypatch.setattr(roll_call, "store", lambda environ: None)
    monkeypatch.setattr(horovod_world, "stop", lambda: meets.append("stop"))
    HorovodWorld().close()
    assert meets == (["slurm", "start", "stop", "served"] if alone else ["start", "stop"])


def test_the_place_of_a_rank_is_what_horovod_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the place's fields; Horovod is left when the world is."""
    told: list[Any] = []
    monkeypatch.setattr(hvd, "init", lambda comm: told.append(comm))
    monkeypatch.setattr(hvd, "shutdown", lambda: told.append("shutdown"))
    for number, name in enumerate(("rank", "size", "local_rank", "local_size", "cross_rank"), start=11):
        monkeypatch.setattr(hvd, name, lambda number=number: number)
    assert horovod_world.start("all") == Place(rank=11, size=12, local_rank=13, local_size=14, cross_rank=15)
    horovod_world.stop()
    assert told == ["all", "shutdown"]


def test_horovods_defaults_that_would_change_a_result_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in a fixed order, and an end for ranks that wait for one that hangs; what the user has set stays."""
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "7")
    monkeypatch.delenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    monkeypatch.setenv("HOROVOD_DISABLE_GROUP_FUSION", "0")
    monkeypatch.delenv("HOROVOD_DISABLE_GROUP_FUSION")
    FourRanks()
    assert os.environ["HOROVOD_DISABLE_GROUP_FUSION"] == "1"
    assert os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "600"
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "7")
    FourRanks()
    assert os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "7"


def test_a_part_of_a_job_keeps_the_places_of_the_whole_job_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every part of a sweep would take GPU 0."""
    for name in ("HOROVOD_DISABLE_GROUP_FUSION", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"):
        monkeypatch.setenv(name, "set by a test")
    monkeypatch.setattr(mpi_roll_call, "call", lambda communicator, facts: None)
    monkeypatch.setattr(horovod_world, "start", lambda communicator: Place(0, 2, 0, 2, 0))
    place = HorovodWorld(RankGroup(None, local_rank=2, local_size=4, num_cores=3)).place
    assert place == Place(0, 2, 2, 4, 0, num_cores=3)

"""The roll call of ranks that meet over MPI, with threads in place of processes."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import mpi_roll_call
from hvd_train.launch.launcher import Launch


class Arrival:
    """What mpi4py returns for a barrier that has begun."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._thread = threading.Thread(target=barrier.wait, daemon=True)
        self._thread.start()

    def Test(self) -> bool:  # noqa: N802  # mpi4py's name
        """Whether all ranks are there."""
        return not self._thread.is_alive()


class Communicator:
    """One rank of a communicator of threads, with the methods of mpi4py's that are used."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._values = rank, len(values), barrier, values

    def Ibarrier(self) -> Arrival:  # noqa: N802  # mpi4py's name
        """Begin a barrier."""
        return Arrival(self._barrier)

    def barrier(self) -> None:
        """Wait for all."""
        self._barrier.wait(20)

    def Allgather(self, sent: array[int], received: array[int]) -> None:  # noqa: N802  # mpi4py's name
        """Fill `received` with a number of each rank."""
        received[:] = array("q", [one[0] for one in self._all(sent)])

    def Allgatherv(self, sent: bytes, received: list[Any]) -> None:  # noqa: N802  # mpi4py's name
        """Fill the memory in `received` with bytes of each rank, as many as the list in it says."""
        memory, lengths = received
        parts = self._all(sent)
        assert lengths == [len(part) for part in parts]
        memory[:] = b"".join(parts)

    def _all(self, value: Any) -> list[Any]:
        self._barrier.wait(20)
        self._values[self.rank] = value
        self._barrier.wait(20)
        return list(self._values)


def call(facts_of_ranks: Sequence[Mapping[str, str]]) -> list[UsageError | None]:
    """The errors of ranks that hold a roll call."""
    size = len(facts_of_ranks)
    barrier, values = threading.Barrier(size), [None] * size

    def one(rank: int) -> UsageError | None:
        try:
            mpi_roll_call.call(Communicator(rank, barrier, values), facts_of_ranks[rank])
        except UsageError as error:
            return error
        return None

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(one, range(size)))


def test_ranks_that_are_the_same_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, and nothing is printed."""
    assert call([{"torch": "2.15.0"}] * 3) == [None] * 3
    assert capsys.readouterr().err == ""


def test_a_difference_stops_all_and_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank has the same error, and knows that it has been printed."""
    errors = call([{"--seed": "0"}, {"--seed": "1"}, {"--seed": "0"}])
    assert len({str(error) for error in errors}) == 1
    assert "(ranks 0, 2); 1 on " in str(errors[0])
    assert capsys.readouterr().err == f"hvd-train: {errors[0]}\n"
    assert all(error is not None and error.reported for error in errors)


def test_a_rank_that_waits_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With its number, again and again, until MPI has found all ranks."""
    monkeypatch.setattr(mpi_roll_call, "_FIRST_NOTICE_S", 0.01)
    printed = threading.Event()
    monkeypatch.setattr(mpi_roll_call, "say", lambda line: (print(line), printed.set()))
    with mpi_roll_call.reporting_the_wait(Launch("Open MPI", 3, 4)):
        assert printed.wait(20)
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("rank 3 on ")
    assert "has been waiting for other ranks for 0 s" in line


@pytest.mark.parametrize(
    ("environ", "by_mpi"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, True),
        ({"PMI_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "HOROVOD_CONTROLLER": "gloo"}, False),
        ({"HOROVOD_RANK": "0"}, False),
    ],
)
def test_whether_ranks_meet_by_mpi(environ: dict[str, str], by_mpi: bool) -> None:
    """Where MPI has started them and Gloo was not asked for."""
    assert mpi_roll_call.meets_over_mpi(environ) is by_mpi

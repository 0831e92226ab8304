"""The roll call over MPI, with an MPI of one rank."""

from __future__ import annotations

import _ctypes
import ctypes
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import mpi_roll_call
from hvd_train.world import mpi


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """mpi4py, with what it was asked to do in `calls`; the process has one MPI library."""
    calls: list[Any] = []
    fake = SimpleNamespace(
        calls=calls, initialized=False, COMM_WORLD="all ranks", THREAD_MULTIPLE=3, Is_finalized=lambda: False
    )
    fake.Is_initialized = lambda: fake.initialized
    fake.Init_thread = lambda level: calls.append(("init", level))
    package = SimpleNamespace(rc=SimpleNamespace(), MPI=fake)
    monkeypatch.setitem(sys.modules, "mpi4py", package)  # type: ignore[arg-type]
    monkeypatch.setattr(mpi, "_loaded_libraries", lambda: {"/opt/openmpi/lib/libmpi.so.40"})
    monkeypatch.setattr(mpi_roll_call, "call", lambda communicator, facts: calls.append((communicator, facts)))
    return fake


def test_mpi_is_initialized_for_the_roll_call_and_left_to_the_caller(fake: Any) -> None:
    """Horovod finds it initialized, and so leaves finalizing it to us."""
    assert mpi.call_roll({"torch": "2.15"}) is fake
    rc = sys.modules["mpi4py"].rc
    assert (rc.initialize, rc.finalize) == (False, False), "else the import alone does both, at times of its own"
    assert fake.calls == [("init", 3), ("all ranks", {"torch": "2.15"})]


def test_an_mpi_that_the_users_script_has_initialized_stays_the_scripts(fake: Any) -> None:
    """It is used for the roll call and finalized by whoever initialized it."""
    fake.initialized = True
    assert mpi.call_roll({}) is None
    assert fake.calls == [("all ranks", {})]


@pytest.mark.parametrize("libraries", [set(), {"/opt/openmpi/lib/libmpi.so.40", "/venv/lib/libmpich.so"}])
def test_no_roll_is_called_by_another_mpi_than_horovods(
    fake: Any, monkeypatch: pytest.MonkeyPatch, libraries: set[str]
) -> None:
    """Two MPI libraries in one process do not know each other's ranks."""
    monkeypatch.setattr(mpi, "_loaded_libraries", lambda: libraries)
    assert mpi.call_roll({}) is None
    assert fake.calls == []


@pytest.mark.parametrize("name", ["libmpi.so.40", "libmpich.so.12"])
def test_the_mpi_libraries_of_this_process_are_those_that_it_has_loaded(tmp_path: Path, name: str) -> None:
    """By the names that Open MPI and MPICH have; what only begins alike, as libmpi_cxx, is none of its own."""
    before = mpi._loaded_libraries()
    source = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libm." in line)
    handles = []
    for copy in (tmp_path / name, tmp_path / "libmpi_cxx.so.40"):
        shutil.copy(source, copy)
        handles.append(ctypes.CDLL(str(copy))._handle)
    try:
        assert mpi._loaded_libraries() - before == {str(tmp_path / name)}
    finally:
        for handle in handles:
            _ctypes.dlclose(handle)
    assert mpi._loaded_libraries() == before


def test_without_mpi4py_no_roll_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod over MPI works without it."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # type: ignore[arg-type]
    assert mpi.call_roll({}) is None


def test_differing_facts_leave_as_they_are(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user reads what the ranks differ in."""

    def differ(communicator: object, facts: object) -> None:
        raise UsageError("the ranks differ in torch")

    monkeypatch.setattr(mpi_roll_call, "call", differ)
    with pytest.raises(UsageError, match="the ranks differ in torch"):
        mpi.call_roll({})


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, "^ofi"), ("^openib", "^openib,ofi"), ("^ofi,openib", "^ofi,openib"), ("self,tcp", "self,tcp")],
)
def test_open_mpi_does_without_what_takes_a_second_to_close(given: str | None, expected: str) -> None:
    """What horovodrun leaves out stays left out, and a list of the user's stays as it is."""
    environ = {} if given is None else {"OMPI_MCA_btl": given}
    mpi.leave_quickly(environ)
    assert environ == {"OMPI_MCA_btl": expected}

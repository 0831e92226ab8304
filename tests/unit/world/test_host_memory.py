"""Memory in common: what one process writes another one reads, and a lock tells whether a process lives."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from hvd_train.world.host_memory import Address, HostMemory, fence, host_identity

FORK = mp.get_context("fork")
BYTES = 4096


def other_process(address: Address, pipe: Connection) -> None:
    """Take lock 3 and write a number, then do as the pipe says."""
    memory = HostMemory.opened(address, BYTES)
    pipe.send(memory.lock(3))
    memory.numbers(64, 4)[1] = 7.0
    memory.words(0, 1, 8, np.int64)[0, 5] = 9
    fence()
    pipe.send("written")
    if pipe.recv() == "unlock":
        memory.unlock(3)
    pipe.send("done")
    pipe.recv()


@pytest.fixture
def memory_and_other() -> Iterator[tuple[HostMemory, Connection, mp.process.BaseProcess]]:
    """Memory, and a process that has opened it, with the pipe to that one."""
    memory, address = HostMemory.made(BYTES)
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=other_process, args=(address, theirs))
    process.start()
    assert ours.recv() is True
    assert ours.recv() == "written"
    yield memory, ours, process
    process.kill()
    process.join()


Both = tuple[HostMemory, Connection, mp.process.BaseProcess]


def test_what_one_writes_the_other_reads(memory_and_other: Both) -> None:
    """Numbers and words are where both expect them."""
    memory, _, _ = memory_and_other
    assert memory.numbers(64, 4).tolist() == [0, 7, 0, 0]
    assert memory.words(0, 1, 8, np.int64)[0, 5] == 9


def test_a_lock_is_held_until_it_is_given_back(memory_and_other: Both) -> None:
    """Others cannot take it, and learn who has it; other locks are free."""
    memory, pipe, process = memory_and_other
    assert not memory.lock(3)
    assert memory.holder(3) == process.pid
    assert memory.holder(2) is None
    assert memory.lock(2)
    pipe.send("unlock")
    assert pipe.recv() == "done"
    assert memory.lock(3)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_process_that_has_ended_is_free(memory_and_other: Both, number: int) -> None:
    """Whatever ends it."""
    memory, _, process = memory_and_other
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join()
    assert memory.holder(3) is None
    assert memory.lock(3)


def test_a_stopped_process_keeps_its_lock(memory_and_other: Both) -> None:
    """It could go on at any moment."""
    memory, _, process = memory_and_other
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert not memory.lock(3)


def test_it_has_no_name(memory_and_other: Both) -> None:
    """Nothing of it is in /dev/shm, where it would outlive all processes, and be limited."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    assert not [name for name in names if "hvd_train" in name]


def test_memory_of_a_process_that_is_not_there() -> None:
    """It is an OSError, which says so."""
    with pytest.raises(OSError, match="No such file"):
        HostMemory.opened((2**22 + 1, 3), BYTES)


def test_identity_is_that_of_the_user() -> None:
    """Two processes of one user on one host have the same; it names no path of the machine."""
    assert host_identity() == host_identity()
    assert host_identity()[-1] == str(os.geteuid())

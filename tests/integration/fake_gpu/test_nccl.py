"""The stand-in for NCCL itself: sums over processes, and all the ways in which they may end halfway."""

from __future__ import annotations

import json
import signal
import uuid
from contextlib import ExitStack
from typing import Any

import pytest

from tests.fake_gpu.launch import OnGpu
from tests.support.launching import finished, started

pytestmark = pytest.mark.integration


def ranks(gpu: OnGpu, play: str, size: int, *arguments: str, **settings: object) -> list[tuple[int, Any]]:
    """Play on every rank at once; return exit code and what was seen, rank by rank."""
    name = uuid.uuid4().hex
    with ExitStack() as stack:
        processes = []
        for rank in range(size):
            variables = {**gpu.variables(**settings), "HOROVOD_RANK": str(rank)}
            command = gpu.play(play, name, str(rank), *arguments)
            output = gpu.folder / f"rank-{rank}.txt"
            processes.append((stack.enter_context(started(command, gpu.folder, output, variables)), output))
        results = []
        for process, output in processes:
            code = process.wait(60)
            lines = output.read_text().splitlines()
            assert code in (0, -signal.SIGKILL), output.read_text()
            results.append((code, json.loads(lines[-1]) if code == 0 else None))
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_are_those_of_all_ranks(gpu: OnGpu, size: int) -> None:
    """fp32, fp16, whole numbers, bf16, greatest ones and means are right on every rank; nothing is left."""
    mean = (size - 1) / 2
    for code, seen in ranks(gpu, "collective", size, str(size)):
        assert (code, seen) == (0, [[True, True, True, True], [[size - 1, 0], [mean, -mean]], 0, 0])


def test_an_abort_leaves_half_a_sum_that_counts_as_done(gpu: OnGpu) -> None:
    """As on a GPU: the event is ready after the abort, and some numbers are summed, and some are not."""
    (_, (early, whole, untouched)), _ = ranks(gpu, "abort", 2, nccl_piece_us=20_000)
    assert early == 600
    assert whole + untouched == 16 << 18
    assert whole > 0
    assert untouched > 0


def test_who_waits_for_a_dead_peer_can_give_up(gpu: OnGpu) -> None:
    """A peer dies inside ncclCommInitRank: without blocking, the other one learns nothing, and its abort works."""
    (code, seen), (died, _) = ranks(gpu, "init", 2, "no", faults="die-in-init@1:1")
    assert (code, seen) == (0, [7, 7, 7, 0, 0])
    assert died == -signal.SIGKILL


def test_an_asynchronous_error_is_told_when_asked(gpu: OnGpu) -> None:
    """The sum hangs, ncclCommGetAsyncError says why, and after the abort the communicator is no more."""
    (_, (seen, afterwards)), (_, aborted) = ranks(gpu, "asynchronous", 2, faults="async-error@2:0")
    assert seen == [6, 600]
    assert (afterwards, aborted) == (-4, 0)
    (line,) = gpu.told()
    assert "has been freed" in line


def test_a_process_may_have_several_devices(gpu: OnGpu) -> None:
    """Two communicators that begin in one group, each on a device of its own, sum over both."""
    code, output = finished(gpu.play("devices", uuid.uuid4().hex), gpu.folder, variables=gpu.variables())
    assert code == 0, output
    assert json.loads(output.splitlines()[-1]) == [3000.0, 3000.0]

"""The stand-in itself: order, memory, races and errors of CUDA, sums of NCCL, and torch's operators."""

import json
import signal
import uuid
from contextlib import ExitStack
from typing import Any

import pytest

from tests.fake_gpu.launch import OnGpu
from tests.support.launching import output_of, started

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def played(gpu: OnGpu, name: str, *arguments: str, of: str = "plays", **settings: object) -> Any:
    output = output_of(gpu.play(name, *arguments, of=of), gpu.folder, variables=gpu.variables(**settings))
    return json.loads(output.splitlines()[-1])


def ranks(gpu: OnGpu, play: str, size: int, *arguments: str, **settings: object) -> list[tuple[int, Any]]:
    """Play on every rank at once; return the exit code and result of each."""
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
            code = process.wait(120)
            assert code in (0, -signal.SIGKILL), output.read_text()
            results.append((code, json.loads(output.read_text().splitlines()[-1]) if code == 0 else None))
    return results


def test_a_stream_does_its_tasks_in_order(gpu: OnGpu) -> None:
    """An event is ready, and a waiting stream continues, when the event's stream reaches it."""
    for seed in range(3):
        assert played(gpu, "order", seed=seed)
    assert played(gpu, "event") == [[600, 600, True], 0, True]


@pytest.mark.parametrize("kind", ["read", "write", "late", "fine", "seen"])
def test_a_race_is_reported(gpu: OnGpu, kind: str) -> None:
    """A race is reported even if it did no harm; a stream or host that waits is no race."""
    assert played(gpu, "race", kind, delay_us=0)
    lines = gpu.mistakes()
    if kind in ("fine", "seen"):
        assert lines == []
    else:
        (line,) = lines
        assert "a race: cudaMemcpyAsync on stream" in line
        assert ("writes" if kind == "write" else "reads") in line


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        ("early", "freed too early"),
        ("told", None),
        ("used", "used after it was freed"),
        ("twice", "which is no memory in use"),
    ],
)
def test_freed_memory_is_watched(gpu: OnGpu, kind: str, mistake: str | None) -> None:
    """Memory that is freed too early, used afterwards or freed twice is reported, and is NaN."""
    is_new_nan, is_freed_nan = played(gpu, "freed", kind)
    assert is_new_nan and (is_freed_nan or kind == "used")
    assert [mistake is not None and mistake in line for line in gpu.mistakes()] == [True] * (mistake is not None)


def test_errors_come_as_ordered(gpu: OnGpu) -> None:
    """A launch fails once, for the ordered rank and job; after an illegal access every call fails."""
    assert played(gpu, "errors", faults="launch@2") == [[0, 701, 0], 0, 0, 0]
    assert played(gpu, "errors", faults="launch@2:1") == [[0, 0, 0], 0, 0, 0], "that is for rank 1"
    assert played(gpu, "last_error") == [101, 101, 101, 0]
    launches, *asked = played(gpu, "errors", faults="broken@1")
    assert (launches[1:], asked) == ([700, 700], [700, 700, 700])
    marks = gpu.folder / "marks"
    marks.mkdir()
    first, second = (played(gpu, "errors", faults="launch@1", once=marks)[0] for _ in range(2))
    assert (first, second) == ([701, 0, 0], [0, 0, 0])


def test_devices_are_as_ordered(gpu: OnGpu) -> None:
    """Memory is as ordered, and CUDA_VISIBLE_DEVICES chooses devices up to the first that does not exist."""
    assert played(gpu, "memory", "1000", memory=5500) == [5, 2]
    for visible, devices in (("2,0", [2, 0]), ("0,7,1", [0]), ("", [])):
        variables = {**gpu.variables(), "CUDA_VISIBLE_DEVICES": visible}
        output = output_of(gpu.play("visible"), gpu.folder, variables=variables)
        assert json.loads(output.splitlines()[-1]) == [f"0000:{device + 1:02x}:00.0" for device in devices]


@pytest.mark.parametrize("size", [1, 3])
def test_nccl_sums_are_those_of_all_ranks(gpu: OnGpu, size: int) -> None:
    """fp32, fp16, integers, maxima and means are right on every rank, and all memory is freed."""
    mean = (size - 1) / 2
    for code, seen in ranks(gpu, "collective", size, str(size)):
        assert (code, seen) == (0, [[True, True, True], [[size - 1, 0], [mean, -mean]], 0, 0])
    assert played(gpu, "devices", uuid.uuid4().hex) == [3000.0, 3000.0]


def test_an_abort_leaves_half_a_sum_that_counts_as_done(gpu: OnGpu) -> None:
    """As on a GPU, the event is ready after the abort, and only some numbers are summed."""
    (_, (early, whole, untouched)), _ = ranks(gpu, "abort", 2, nccl_piece_us=1_000_000)
    assert early == 600
    assert whole + untouched == 16 << 18
    assert min(whole, untouched) > 0


def test_a_lost_peer_of_nccl_can_be_given_up(gpu: OnGpu) -> None:
    """A peer that dies in ncclCommInitRank is silent; an asynchronous error is returned on request."""
    (code, seen), (died, _) = ranks(gpu, "init", 2, faults="die-in-init@1:1")
    assert (code, seen) == (0, [7, 7, 7, 0, 0])
    assert died == -signal.SIGKILL
    (_, (seen, afterwards)), (_, aborted) = ranks(gpu, "asynchronous", 2, faults="async-error@2:0")
    assert seen == [6, 600]
    assert (afterwards, aborted) == (-4, 0)
    (line,) = gpu.mistakes()
    assert "has been freed" in line


def test_operators_of_torch_are_those_of_the_cpu(gpu: OnGpu) -> None:
    """Training, views, resized results, groups, number formats and layouts are bit-identical."""
    assert played(gpu, "operators", of="torch_plays", delay_us=1000) == []


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [("waits", None), ("forgets", "a race: aten.sum"), ("told", None), ("untold", "freed too early")],
)
def test_a_side_stream_of_torch_has_to_wait(gpu: OnGpu, kind: str, mistake: str | None) -> None:
    """Memory that it reads must be recorded for it before its tensor ends."""
    total = played(gpu, "stream", kind, of="torch_plays")
    assert total == 2000.0 or mistake
    assert [mistake is not None and mistake in line for line in gpu.mistakes()] == [True] * (mistake is not None)


def test_torch_sees_late_copies_and_errors(gpu: OnGpu) -> None:
    """A copy from pinned memory is as late as its stream; a failed launch and lack of memory are torch's errors."""
    values, is_given = played(gpu, "copies", of="torch_plays")
    assert 2.0 in values
    assert not is_given
    failed = "CUDA error: too many resources requested for launch"
    settings = {"faults": "launch@2", "memory": 10**8, "caching": True}
    assert played(gpu, "errors", of="torch_plays", **settings) == ["fine", failed, "out of memory"]

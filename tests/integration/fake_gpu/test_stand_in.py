"""The stand-in itself: order, memory and races of CUDA, sums of NCCL, and torch's operators."""

import json
import sys
import uuid
from contextlib import ExitStack
from typing import Any

import pytest

from tests.fake_gpu.launch import OnGpu
from tests.support.launching import output_of, started

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.fake_gpu.plays", *arguments]


def played(gpu: OnGpu, *arguments: str, **settings: object) -> Any:
    return json.loads(output_of(command(*arguments), gpu.folder, variables=gpu.variables(**settings)).splitlines()[-1])


def ranks(gpu: OnGpu, play: str, size: int, *arguments: str, **settings: object) -> list[Any]:
    """Play on every rank at once; return the result of each."""
    name = uuid.uuid4().hex
    with ExitStack() as stack:
        processes = []
        for rank in range(size):
            output = gpu.folder / f"rank-{rank}.txt"
            line = command(play, name, str(rank), *arguments)
            processes.append(
                (stack.enter_context(started(line, gpu.folder, output, gpu.variables(**settings))), output)
            )
        for process, output in processes:
            assert process.wait(120) == 0, output.read_text()
        return [json.loads(output.read_text().splitlines()[-1]) for _, output in processes]


def check_mistake(gpu: OnGpu, mistake: str | None) -> None:
    assert [mistake is not None and mistake in line for line in gpu.mistakes()] == [True] * (mistake is not None)


def test_a_stream_does_its_tasks_in_order(gpu: OnGpu) -> None:
    """An event is ready, and a waiting stream continues, when the event's stream reaches it."""
    for seed in range(3):
        assert played(gpu, "order", seed=seed)
    assert played(gpu, "event") == [[600, 600, True], 0, True]


@pytest.mark.parametrize(
    ("kind", "mistake"), [("read", "reads"), ("write", "writes"), ("late", "reads"), ("fine", None), ("seen", None)]
)
def test_a_race_is_reported(gpu: OnGpu, kind: str, mistake: str | None) -> None:
    """A race is reported even if it did no harm; a stream or host that waits is no race."""
    assert played(gpu, "race", kind, delay_us=0)
    check_mistake(gpu, mistake)


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [("early", "freed too early"), ("used", "used after it was freed"), ("twice", "which is no memory in use")],
)
def test_freed_memory_is_watched(gpu: OnGpu, kind: str, mistake: str) -> None:
    """Memory that is freed too early, used afterwards or freed twice is reported, and is NaN."""
    assert played(gpu, "freed", kind) == [True, True]
    check_mistake(gpu, mistake)


def test_a_call_that_is_absent_is_reported(gpu: OnGpu) -> None:
    assert played(gpu, "absent") != 0
    check_mistake(gpu, "there is no cudaGraphDestroy")


def test_nccl_sums_are_those_of_all_ranks(gpu: OnGpu) -> None:
    """Sums in fp32 and fp16 and means are right on every rank."""
    assert ranks(gpu, "collective", 3) == [[True, True, True]] * 3


def test_an_abort_leaves_half_a_sum_that_counts_as_done(gpu: OnGpu) -> None:
    """As on a GPU, the event is ready after the abort; a later call of the communicator is reported."""
    (early, whole, untouched, error), _ = ranks(gpu, "abort", 2, nccl_piece_us=500_000)
    assert (early, error, whole + untouched) == (600, 4, 16 << 18)
    assert min(whole, untouched) > 0
    check_mistake(gpu, "has been freed")


def test_operators_of_torch_are_those_of_the_cpu(gpu: OnGpu) -> None:
    """Training, views, resized results, number formats and layouts are bit-identical."""
    assert played(gpu, "operators", delay_us=1000) == []


@pytest.mark.parametrize(("kind", "mistake"), [("waits", None), ("forgets", "a race: aten.sum")])
def test_a_side_stream_of_torch_has_to_wait(gpu: OnGpu, kind: str, mistake: str | None) -> None:
    """A late copy from pinned memory takes what is in it by then."""
    total, copied = played(gpu, "side_stream", kind)
    assert total == 2000.0 or mistake
    assert copied == [1.0, 2.0]
    check_mistake(gpu, mistake)

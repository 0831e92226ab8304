"""The stand-in for CUDA itself: order, memory, races and errors to order. Nothing here imports torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.fake_gpu import build
from tests.fake_gpu.launch import OnGpu
from tests.support.launching import finished

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_does_its_tasks_in_order(gpu: OnGpu, seed: int) -> None:
    """A chain of copies, each of the last one's result, comes out right however late the stream is."""
    assert gpu.played("order", seed=seed)


def test_an_event_is_ready_when_its_stream_has_come_to_it(gpu: OnGpu) -> None:
    """Before that it is not, nor is what waits for it done: there the new memory is still full of NaN."""
    early, ready, is_right = gpu.played("event")
    assert early == [600, 600, True]
    assert (ready, is_right) == (0, True)


@pytest.mark.parametrize("kind", ["read", "write", "late"])
def test_a_race_is_told(gpu: OnGpu, kind: str) -> None:
    """A stream that does not wait for another's writing is told, even where it was in time by luck."""
    assert gpu.played("race", kind, delay_us=0)
    (line,) = gpu.told()
    assert "a race: cudaMemcpyAsync on stream" in line
    assert ("writes" if kind == "write" else "reads") in line


@pytest.mark.parametrize("kind", ["fine", "seen"])
def test_what_waits_is_no_race(gpu: OnGpu, kind: str) -> None:
    """Neither a stream that waits for the other's event nor work that comes after the host has waited is told."""
    assert gpu.played("race", kind)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("early", "freed too early"),
        ("told", None),
        ("used", "used after it was freed"),
        ("twice", "which is no memory in use"),
    ],
)
def test_freed_memory_is_watched(gpu: OnGpu, kind: str, told: str | None) -> None:
    """What is freed under a stream that has not been told, used afterwards or freed twice is told, and is NaN."""
    is_new_nan, is_freed_nan = gpu.played("freed", kind)
    assert is_new_nan
    assert is_freed_nan or kind == "used"
    lines = gpu.told()
    assert len(lines) == (0 if told is None else 1), lines
    assert told is None or told in lines[0]


def test_an_error_to_order_comes_once(gpu: OnGpu) -> None:
    """The second launch fails with the error of a launch, and neither the first nor the third."""
    assert gpu.played("errors", faults="launch@2") == [[0, 701, 0], 0, 0, 0]
    assert gpu.played("errors", faults="launch@2:1") == [[0, 0, 0], 0, 0, 0], "that is for rank 1"


def test_after_an_illegal_access_every_call_fails(gpu: OnGpu) -> None:
    """A kernel that goes wrong breaks the process's GPU for good: asking for the error does not mend it."""
    launches, synchronize, *asked = gpu.played("errors", faults="broken@1")
    assert launches[1:] == [700, 700]
    assert (synchronize, asked) == (700, [700, 700])


def test_an_error_is_kept_until_it_is_asked_for(gpu: OnGpu) -> None:
    """cudaGetLastError returns the last error once, cudaPeekAtLastError leaves it."""
    assert gpu.played("last_error") == [101, 101, 101, 0]


def test_a_device_has_as_much_memory_as_was_ordered(gpu: OnGpu) -> None:
    """What does not fit is out of memory, and fits when something else has been freed."""
    assert gpu.played("memory", "1000", memory=5500) == [5, 2]


@pytest.mark.parametrize(("visible", "count"), [("2,0", 2), ("1", 1), ("0,7,1", 1), ("", 0)])
def test_the_visible_devices_are_those_of_the_variable(gpu: OnGpu, visible: str, count: int) -> None:
    """CUDA_VISIBLE_DEVICES chooses and orders devices, and its list ends at the first that is not there."""
    variables = {**gpu.variables(), "CUDA_VISIBLE_DEVICES": visible}
    code, output = finished(gpu.play("visible"), gpu.folder, variables=variables)
    assert code == 0, output
    numbers = [f"0000:{int(n) + 1:02x}:00.0" for n in visible.split(",")[:count] if n]
    assert json.loads(output.splitlines()[-1]) == numbers


def test_a_fault_for_a_job_happens_once(gpu: OnGpu) -> None:
    """Processes that share a folder of marks play each fault once among them."""
    marks = gpu.folder / "marks"
    marks.mkdir()
    first = gpu.played("errors", faults="launch@1", once=marks)
    second = gpu.played("errors", faults="launch@1", once=marks)
    assert (first[0], second[0]) == ([701, 0, 0], [0, 0, 0])


def test_the_libraries_are_built_when_sources_change(
    libraries: build.FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sources give the same files without a compiler, and a changed one or another compiler others."""
    stamp = libraries.library.stat().st_mtime_ns
    monkeypatch.setattr(build, "_build", pytest.fail)
    assert build.built() == libraries
    assert libraries.library.stat().st_mtime_ns == stamp
    before = build.digest("g++", build.headers())
    shutil.copytree(build.SOURCES, tmp_path / "source")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "source")
    assert build.digest("g++", build.headers()) == before
    assert build.digest("true", build.headers()) != before
    with (tmp_path / "source" / "memory.h").open("a") as file:
        file.write("\n")
    assert build.digest("g++", build.headers()) != before


def test_why_there_is_no_stand_in_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tests are skipped, with the reason, only where torch has no CUDA or Horovod no NCCL."""
    import horovod.torch as hvd
    import torch

    with monkeypatch.context() as without:
        without.setattr(hvd, "nccl_built", lambda: False)
        with pytest.raises(build.NotHere, match="Horovod is built without NCCL"):
            build.built()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(build.NotHere, match=r"torch \S+ is built without CUDA"):
        build.built()

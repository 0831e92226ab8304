"""`hvd-train bench` and `--profile` on the stand-in: they come to their end, and what they write is complete."""

from __future__ import annotations

import json

import pytest

from tests.fake_gpu.launch import OnGpu
from tests.support import jpegs, traces
from tests.support.documented import missing
from tests.support.launching import HVD_TRAIN, finished, launch_line

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        (2, "throughput digits --steps 2 --repetitions 2"),
        (2, "allreduce --max-size 64KB --repetitions 2"),
        (1, "input --data folder --data-dir data --batch-size 16 --workers 2 --seconds 1"),
    ],
)
def test_a_measurement_is_complete(gpu: OnGpu, ranks: int, line: str) -> None:
    """The record has every number that the page explains, and says that it was made on GPUs, over NCCL."""
    jpegs.digits(gpu.folder / "data", range(2), most=20)
    command = [HVD_TRAIN, "bench", *line.split(), "--device", "cuda", "--json", "found.json"]
    command = launch_line("gloo" if ranks > 1 else "none", ranks, *command)
    code, output = finished(command, gpu.folder, variables=gpu.variables())
    assert code == 0, output
    found = json.loads((gpu.folder / "found.json").read_text())
    assert missing(found) == set()
    assert found["device"].startswith("cuda"), found
    assert ranks == 1 or found["controller"] == "NCCL, with Gloo"


def test_the_largest_batch_on_a_small_gpu(gpu: OnGpu) -> None:
    """A size that is out of memory is a row, memory is given back, and smaller ones are tried until it is found."""
    line = "batch digits --from 512 --repetitions 1 --device cuda --json found.json"
    command = launch_line("gloo", 2, HVD_TRAIN, "bench", *line.split())
    variables = gpu.variables(memory=64_000_000, caching=True)
    code, output = finished(command, gpu.folder, variables=variables)
    assert code == 0, output
    found = json.loads((gpu.folder / "found.json").read_text())
    assert found["ended_by"] == "memory"
    assert missing(found) == set()
    fits = [row for row in found["rows"] if row["failed"] is None]
    assert found["largest_that_fits"] == fits[-1]["batch_size"] >= 512
    assert all(row["peak_memory"] < 64_000_000 for row in fits)
    assert [row["peak_memory"] for row in fits] == sorted(row["peak_memory"] for row in fits)


def test_a_profile_has_the_steps_of_all_ranks(gpu: OnGpu) -> None:
    """Its steps and phases are there, with the operators; of the device the stand-in tells the profiler nothing."""
    line = [
        HVD_TRAIN,
        "train",
        "digits",
        "--device",
        "cuda",
        "--epochs",
        "1",
        "--profile",
        "4:6",
        "--output-dir",
        "run",
    ]
    code, output = finished(launch_line("gloo", 2, *line), gpu.folder, variables=gpu.variables())
    assert code == 0, output
    of_ranks = [
        spans
        for name, spans in traces.read(gpu.folder / "run/profile/steps-4-to-6.json.gz").items()
        if name.startswith("rank")
    ]
    assert [[span["name"] for span in spans["steps"]] for spans in of_ranks] == [["step 4", "step 5", "step 6"]] * 2
    for spans in of_ranks:
        assert {"forward", "backward", "reduction", "optimizer"} <= {span["name"] for span in spans["phases"]}

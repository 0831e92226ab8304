"""A rank whose memory does not suffice ends the job with one line, and what it has half done is not kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launching import HVD_TRAIN, finished, launch_line

pytestmark = pytest.mark.integration

TRAIN = "with 32 samples in a pass: this process .*; type --batch-size 16 --accumulation-steps 2: the same steps"
EVALUATION = "with 512 samples in a pass of an evaluation: this process .*; type --eval-batch-size 256: the scores"


@pytest.mark.parametrize(
    ("breaks", "ranks", "says"),
    [
        pytest.param("train:0,1", "[01]", TRAIN, id="on all ranks"),
        pytest.param("update:0", "0", TRAIN, id="in the middle of an update"),
        pytest.param("train:1", "1", TRAIN, id="on one rank", marks=pytest.mark.slow),
        pytest.param("evaluation:0,1", "[01]", EVALUATION, id="in an evaluation", marks=pytest.mark.slow),
    ],
)
def test_the_job_ends_with_one_line(tmp_path: Path, breaks: str, ranks: str, says: str) -> None:
    """It names the rank, the size of the batch, the memory and what to type; the step that broke is not committed."""
    line = [HVD_TRAIN, "train", "digits", "--device", "cpu", "--model", "tests.support.greedy:network"]
    line += ["--batch-size", "32", "--eval-batch-size", "512", "--epochs", "1", "--output-dir", "run"]
    variables = {"GREEDY": breaks, "PYTHONPATH": str(Path(__file__).parents[2])}
    code, output = finished(launch_line("gloo", 2, *line), tmp_path, variables=variables)
    assert code == 8, output
    told = re.findall(rf"hvd-train: rank {ranks} on \S+: out of memory {says}", output)
    assert len(told) == output.count("out of memory") == 1, output
    assert "Traceback" not in output
    if breaks == "update:0":
        assert not list((tmp_path / "run").rglob("*.ckpt")), "no step had been committed before"

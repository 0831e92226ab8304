"""A profile of every rank, with real launchers."""

import gzip
import json
from pathlib import Path

import pytest

from tests.support.launching import HVD_TRAIN, launch_line, output_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_two_ranks_are_traced(tmp_path: Path) -> None:
    train = ["train", "digits", "--epochs", "1", "--profile", "4:6", "--output-dir", "run"]
    output = output_of(launch_line("gloo", 2, HVD_TRAIN, *train), tmp_path)
    assert "profile of steps 4 to 6: run/profile/steps-4-to-6-rank-0.json.gz" in output
    files = tmp_path / "run/profile"
    for rank in range(2):
        trace = json.loads(
            gzip.decompress((files / f"steps-4-to-6-rank-{rank}.json.gz").read_bytes())
        )
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"} <= names

"""`--profile` on one rank: the trace, its summary, and faults that only the profile notices."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_train.errors import RankLost
from hvd_train.world.world import LocalWorld, PendingSum, World
from tests.support.faults import full_disk
from tests.support.runs import Weights, equal, small_config, trained


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore this variable after a test: a profile sets it for its process."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")


def weights(world: World | None = None, **changes: object) -> Weights:
    return trained(world or LocalWorld(), small_config(**{"epochs": 2, **changes}))[1]


def spans_of(path: str) -> list[dict[str, Any]]:
    events = json.loads(gzip.decompress(Path("run/profile", path).read_bytes()))["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_chosen_steps_are_traced_over_the_end_of_an_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The trace holds these steps alone, and the weights are the same without it."""
    assert equal(weights(profile="9:12"), weights(output_dir=Path("other")))
    spans = spans_of("steps-9-to-12-rank-0.json.gz")
    steps = [span for span in spans if span["name"].startswith("ProfilerStep#")]
    assert [step["name"] for step in steps] == [f"ProfilerStep#{number}" for number in range(9, 13)]
    # one call for each micro-batch, and an evaluation after step 10
    calls = [span["ts"] for span in spans if span["name"] == "aten::addmm"]
    assert sum(time >= steps[0]["ts"] for time in calls) > 5 + 3 + 5 + 5
    output = capsys.readouterr().out
    assert "profile of steps 9 to 12: run/profile/steps-9-to-12-rank-0.json.gz" in output
    assert output.count("aten::") >= 5  # of the ten largest costs, in whatever order


def test_a_trace_is_not_written_through_a_link() -> None:
    weights()
    Path("precious").touch()
    Path("run/profile").mkdir()
    Path("run/profile/steps-21-to-21-rank-0.json.gz").symlink_to(Path("precious").resolve())
    weights(epochs=3, profile="21")
    assert spans_of("steps-21-to-21-rank-0.json.gz")
    assert Path("precious").read_bytes() == b""


def test_a_training_that_ends_before_its_profile(capsys: pytest.CaptureFixture[str]) -> None:
    weights(profile="19:30")
    assert "no profile of steps 19 to 30: the training has ended" in capsys.readouterr().out
    assert not Path("run/profile").exists()


class Breaking(LocalWorld):
    """A world that loses another rank in the fourth step."""

    steps = 0

    def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
        self.steps += name == "step"
        if self.steps == 4:
            raise RankLost("gone")
        return super().start_sum(tensor, name)


def test_a_lost_rank_ends_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    """Torch's profiler is free again."""
    with pytest.raises(RankLost):
        weights(Breaking(), profile="2:8")
    assert "no profile of steps 2 to 8: a rank was lost" in capsys.readouterr().out
    assert not torch.autograd._profiler_enabled()


def test_a_full_disk_costs_the_profile_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full_disk)
    weights(profile="2:3")
    trace = "run/profile/steps-2-to-3-rank-0.json.gz"
    line = f"no profile of steps 2 to 3: cannot write {trace}: No space left"
    assert line in capsys.readouterr().err

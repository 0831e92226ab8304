"""`--profile` on one rank: the trace, its summary, and that no failure of a profile reaches the training."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hvd_train.errors import RankLost, UsageError
from hvd_train.run_files import durable
from hvd_train.world.world import LocalWorld, PendingSum, World
from tests.support import traces
from tests.support.runs import Weights, equal, small_config, trained


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile sets this for its process; it is taken back after a test."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")


def weights(world: World | None = None, **changes: object) -> Weights:
    """Return the final weights of a training of two epochs of ten steps."""
    return trained(world or LocalWorld(), small_config(epochs=2, **changes))[1]


def test_chosen_steps_are_traced_over_the_end_of_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    """The trace holds just these steps with their phases and operators, and the weights are the same without it."""
    assert equal(weights(profile="9:12"), weights(output_dir=Path("other")))
    (process,) = traces.read(Path("run/profile/steps-9-to-12.json.gz")).values()
    steps = process.pop("steps")
    assert [step["name"] for step in steps] == ["step 9", "step 10", "step 11", "step 12"]
    assert [span["name"] for span in process.pop("phases")].count("backward") >= 4
    (operators,) = process.values()
    inside = [span for span in operators if span["name"] == "aten::addmm" and steps[0]["ts"] <= span["ts"]]
    assert len(inside) > 5 + 3 + 5 + 5  # a call for each slot of these steps, and an evaluation after the second one
    output = capsys.readouterr().out
    assert "profile of steps 9 to 12, on 1 rank: run/profile/steps-9-to-12.json.gz" in output
    assert "exposed reduction:" in output


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        ("19:30", "profile of steps 19 to 20 (the training ended then)"),
        ("21", None),
    ],
)
def test_a_training_that_ends_before_its_profile(
    asked: str, seen: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps that were done are written; where there are none, a line says so."""
    weights(profile=asked)
    output = capsys.readouterr().out
    assert (seen in output) if seen else "no profile of step 21: the training ended" in output


def test_steps_that_are_done_already_are_not_traced(capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run says so and goes on."""
    weights()
    (checkpoint,) = Path("run/checkpoints").iterdir()
    weights(resume=str(checkpoint), output_dir=Path("more"), profile="5")
    assert "nothing more is traced of step 5: step 20 is done already" in capsys.readouterr().out


class Breaking(LocalWorld):
    """A world of one rank in which another rank seems to be lost in the fourth step."""

    steps = 0

    def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
        """Raise RankLost in that step."""
        self.steps += name == "step"
        if self.steps == 4:
            raise RankLost("gone")
        return super().start_sum(tensor, name)


def test_a_lost_rank_ends_the_profile_and_leaves_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Whole steps before the loss are kept, and torch's profiler is free for the next profile."""
    with pytest.raises(RankLost):
        weights(Breaking(), profile="2:8")
    assert "profile of steps 2 to 3 (RankLost broke it off)" in capsys.readouterr().out
    (process,) = traces.read(Path("run/profile/steps-2-to-3.json.gz")).values()
    assert [step["name"] for step in process["steps"]] == ["step 2", "step 3"]
    assert not torch.autograd._profiler_enabled()


def test_a_full_disk_costs_the_profile_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says that the profile could not be written, and the training goes on to its end."""
    whole = durable.write

    def full(path: Path, content: bytes, *permission: durable.Permission) -> None:
        if path.suffix == ".gz":
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(path, content, *permission)

    monkeypatch.setattr(durable, "write", full)
    weights(profile="2:3")
    lines = [line for line in capsys.readouterr().out.splitlines() if "no profile" in line]
    assert lines == [
        "no profile of steps 2 to 3: cannot write run/profile/steps-2-to-3.json.gz: No space left on device; "
        "training goes on without it"
    ]


def test_a_profiler_that_fails_costs_the_profile_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no folder for temporary files, one line says so and training goes on."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    weights(profile="2:3")
    lines = [line for line in capsys.readouterr().out.splitlines() if "no profile" in line]
    assert len(lines) == 1
    assert lines[0].startswith("no profile of steps 2 to 3: rank 0: the profiler failed ([Errno 2]")


def test_a_timeline_of_the_users_own_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod writes one timeline at a time."""
    monkeypatch.setenv("HOROVOD_TIMELINE", "mine.json")
    with pytest.raises(UsageError, match="unset HOROVOD_TIMELINE"):
        weights(profile="2")

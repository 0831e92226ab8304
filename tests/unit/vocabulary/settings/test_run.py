"""Settings of where and how often: what they refuse, and how times and steps are written."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_train import Config
from hvd_train.errors import UsageError
from tests.support.refused import assert_refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_ids": (0, 0)}, "--gpu-ids names a GPU twice"),
        ({"commit_steps": 0}, "--commit-steps is 0"),
        ({"commit_seconds": 0.0}, "--commit-seconds is 0"),
        ({"keep_checkpoints": 0}, "--keep-checkpoints is 0"),
        ({"log_steps": 0}, "--log-steps is 0"),
        ({"eval_epochs": 0}, "--eval-epochs is 0"),
    ],
)
def test_values_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    """The message names the flag, the value and what it must be."""
    assert_refused(changes, message)


@pytest.mark.parametrize(("text", "seconds"), [("2h30m", 9000), ("90m", 5400), ("45s", 45), ("1h0m5s", 3605)])
def test_a_time_limit_is_written_as_people_do(text: str, seconds: float) -> None:
    """Hours, minutes and seconds, each where it is needed."""
    assert Config().replace(max_time=text).run.max_seconds == seconds


@pytest.mark.parametrize("text", ["", "2", "2 hours", "30m2h", "1.5h", "-1h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """With an example of what is."""
    with pytest.raises(UsageError, match="write it as in 2h30m"):
        Config().replace(max_time=text)


@pytest.mark.parametrize(("text", "steps"), [("20", range(20, 21)), ("20:25", range(20, 26)), ("1:50", range(1, 51))])
def test_profiled_steps_are_written_as_one_or_as_first_and_last(text: str, steps: range) -> None:
    """The last one is profiled, too."""
    assert Config().replace(profile=text).run.profiled_steps == steps


@pytest.mark.parametrize("text", ["", "0", "0:3", "5:4", "2-3", "1:51", "1:100", "a", "²", "1:", "-1"])
def test_what_are_no_steps_to_profile_is_refused(text: str) -> None:
    """With an example of what are, or with the number of steps that a trace can hold."""
    assert_refused({"profile": text}, f"--profile {text}: ")

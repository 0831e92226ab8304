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
        ({"recheck_steps": "often"}, "--recheck-steps often: write a number of steps, auto or none"),
        ({"recheck_steps": -1}, "--recheck-steps -1: write a number"),
        ({"recheck_steps": 10, "sync_batch_norm": True}, "--recheck-steps has each rank compute a slot by itself"),
        ({"keep_checkpoints": 0}, "--keep-checkpoints is 0"),
        ({"log_steps": 0}, "--log-steps is 0"),
        ({"eval_epochs": 0}, "--eval-epochs is 0"),
    ],
)
def test_values_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    """The message names the flag, the value and what it must be."""
    assert_refused(changes, message)


@pytest.mark.parametrize(
    ("value", "text", "every"),
    [("auto", "auto", None), ("AUTO", "auto", None), ("none", "none", None), (0, "none", None), (500, "500", 500)],
)
def test_rechecks_come_by_time_by_steps_or_never(value: str | int, text: str, every: int | None) -> None:
    """A number may be one of Python; with synchronised batch norm the default is no error."""
    run = Config().replace(recheck_steps=value).run
    assert (run.recheck_steps, run.rechecked_every) == (text, every)
    assert Config().replace(sync_batch_norm=True).run.recheck_steps == "auto"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("2h30m", 9000), ("90m", 5400), ("45s", 45), ("1h0m5s", 3605)],
        *[("1.5h", 5400), ("0.5m", 30), ("90", 90), ("3.0", 3)],
    ],
)
def test_a_time_limit_is_written_as_people_do(text: str, seconds: float) -> None:
    """Hours, minutes and seconds, each where it is needed, with decimals; a number alone is seconds."""
    assert Config().replace(max_time=text).run.max_seconds == seconds
    assert Config().replace(total_time=text).schedule.total_seconds == seconds


@pytest.mark.parametrize("text", ["", "2h30", "2 hours", "30m2h", "1.5.5h", "h", "-1h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """With an example of what is."""
    with pytest.raises(UsageError, match="write it as in 2h30m"):
        Config().replace(max_time=text)
    with pytest.raises(UsageError, match=r"--total-time .*write it as in 2h30m"):
        Config().replace(total_time=text)


@pytest.mark.parametrize(("text", "steps"), [("20", range(20, 21)), ("20:25", range(20, 26)), ("1:50", range(1, 51))])
def test_profiled_steps_are_written_as_one_or_as_first_and_last(text: str, steps: range) -> None:
    """The last one is profiled, too."""
    assert Config().replace(profile=text).run.profiled_steps == steps


@pytest.mark.parametrize("text", ["", "0", "0:3", "5:4", "2-3", "1:51", "1:100", "a", "²", "1:", "-1"])
def test_what_are_no_steps_to_profile_is_refused(text: str) -> None:
    """With an example of what are, or with the number of steps that a trace can hold."""
    assert_refused({"profile": text}, f"--profile {text}: ")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (("tensorboard", "wandb"), ("tensorboard", "wandb")),
        (("CSV, wandb",), ("csv", "wandb")),
        ("mlflow,csv", ("mlflow", "csv")),
        (("csv", "csv"), ("csv",)),
        (("none",), ()),
        ((), ()),
    ],
)
def test_destinations_are_written_with_blanks_or_commas(value: Any, names: tuple[str, ...]) -> None:
    """In capitals or not, each counts once; none stands for nothing."""
    assert Config().replace(log_to=value).run.log_to == names


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (("wanb",), "unknown destination of --log-to 'wanb'; did you mean 'wandb'?"),
        (("csv,none",), "--log-to has none and others"),
    ],
)
def test_unknown_destinations_are_refused(value: tuple[str, ...], message: str) -> None:
    """With the nearest one."""
    assert_refused({"log_to": value}, message)

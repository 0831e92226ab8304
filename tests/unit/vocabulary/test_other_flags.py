"""Flags of other programs, answered with ours."""

from __future__ import annotations

import re

import pytest

from hvd_train import other_flags
from hvd_train.commands.train import ALIASES, OF_LAUNCHERS, parse_train
from hvd_train.config import Config
from hvd_train.errors import UsageError

OURS = {f"--{name.replace('_', '-')}" for name in Config().settings()}
ALL = sorted({*other_flags._OURS, *other_flags._TOLD})


def test_none_of_them_is_ours() -> None:
    """A flag that is taken, or that belongs to launchers, needs no answer; one flag has one answer."""
    assert not set(ALL) & (OURS | set(ALIASES) | set(OF_LAUNCHERS))
    assert not set(other_flags._OURS) & set(other_flags._TOLD)
    names = [name for names in (*other_flags._NAMES.values(), *other_flags._LINES.values()) for name in names]
    assert len(names) == len(set(names)) == len(ALL)


@pytest.mark.parametrize("flag", ALL)
def test_the_answer_names_flags_that_there_are(flag: str) -> None:
    """In one line, whether or not a value follows, and with underscores, too."""
    for typed in ([flag], [flag, "3"], [f"{flag}=3"], [flag[:2] + flag[2:].replace("-", "_")]):
        with pytest.raises(UsageError) as refused:
            parse_train(typed)
        line = str(refused.value)
        assert line.startswith(flag)
        assert "\n" not in line
        named = set(re.findall(r"(?<!\w)--[a-z][a-z0-9-]*", line.replace("`tensorboard --logdir", "")))
        assert named - {flag} <= OURS | {"--np", "--hosts"}, line

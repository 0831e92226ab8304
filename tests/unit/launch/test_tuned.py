"""Files of Horovod's settings: what they may hold, and that nothing else is said to Horovod."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import tuned
from hvd_train.launch.tuned import CACHE, CYCLE, DEFAULTS, FUSION


def test_what_is_written_is_read_back() -> None:
    """Comments and blank lines do not matter."""
    path = Path("tuned.env")
    path.write_text(tuned.text({**DEFAULTS, CYCLE: "2.50"}, ["made by", "a test"]) + f"\n  {'#'} more\n")
    assert tuned.read(path) == {FUSION: "134217728", CYCLE: "2.50", CACHE: "1024"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("HOROVOD_CYCLETIME=3", "unknown setting 'HOROVOD_CYCLETIME'; did you mean 'HOROVOD_CYCLE_TIME'?"),
        ("PATH=/tmp", "unknown setting 'PATH'"),
        ("HOROVOD_CYCLE_TIME", "HOROVOD_CYCLE_TIME is ''; it must be a number from 0.01 to 1000"),
        ("HOROVOD_CYCLE_TIME=nan", "HOROVOD_CYCLE_TIME is 'nan'"),
        ("HOROVOD_CYCLE_TIME=0", "HOROVOD_CYCLE_TIME is '0'"),
        ("HOROVOD_FUSION_THRESHOLD=64MB", "is '64MB'; it must be a whole number from 0 to 2147483648"),
        ("HOROVOD_FUSION_THRESHOLD=-1", "is '-1'"),
        ("HOROVOD_CACHE_CAPACITY=1.5", "is '1.5'"),
        ("HOROVOD_CACHE_CAPACITY=²", "is '²'"),
        ("HOROVOD_CACHE_CAPACITY=١", "is '١'"),
        ("=3", "unknown setting ''"),
        ("HOROVOD_CACHE_CAPACITY=1\nHOROVOD_CACHE_CAPACITY=1", "stands there twice"),
    ],
)
def test_a_line_that_cannot_be_is_named(line: str, said: str) -> None:
    """The error says which line, and what is wrong with it, in one line."""
    path = Path("tuned.env")
    path.write_text(f"# a comment\n{line}\n")
    with pytest.raises(UsageError) as error:
        tuned.read(path)
    assert said in str(error.value)
    assert str(error.value).startswith("tuned.env, line ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read(content: bytes | None) -> None:
    """One line, whether it is missing or no text."""
    if content is not None:
        Path("tuned.env").write_bytes(content)
    with pytest.raises(UsageError, match=r"^--tuned tuned\.env"):
        tuned.read(Path("tuned.env"))


def test_what_is_said_already_is_not_changed() -> None:
    """A variable of another value is an error; one of the same value is not."""
    environ = {CYCLE: "2"}
    tuned.apply({CYCLE: "2", FUSION: "1"}, environ)
    assert environ == {CYCLE: "2", FUSION: "1"}
    with pytest.raises(UsageError, match="unset HOROVOD_CYCLE_TIME"):
        tuned.apply({CYCLE: "3"}, environ)

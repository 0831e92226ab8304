"""Records: intervals, numbers, and which file may be replaced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from hvd_train.bench import record
from hvd_train.bench.record import estimate, written
from hvd_train.errors import UsageError


@pytest.mark.parametrize("count", [2, 3, 5, 20, 21, 22, 60])
def test_the_interval_is_student_s(count: int) -> None:
    """As scipy has it of the logarithms, for few repetitions and for many."""
    values = [1.0 + number * number % 7 for number in range(count)]
    found, logs = estimate(values), np.log(values)
    ends = np.exp(stats.t.interval(0.95, count - 1, logs.mean(), stats.sem(logs)))
    assert found.mean == pytest.approx(stats.gmean(values))
    assert np.log(found.interval or ()) == pytest.approx(np.log(ends), abs=3e-3 * np.ptp(np.log(ends)))


def test_no_speed_is_below_zero() -> None:
    """However much two repetitions differ."""
    low, high = estimate([1000.0, 20000.0]).interval or (0.0, 0.0)
    assert 0 < low < 1000 < 20000 < high


def test_one_repetition_has_no_interval() -> None:
    """It says nothing of how much repetitions scatter; JSON has null there, not NaN."""
    assert estimate([3.0]).interval is None


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,234"), (12.345, "12.3"), (0.00123456, "0.00123"), (0.0, "0"), (1.0, "1.00")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    """A bandwidth of a few KB/s is not written as 0.000 GB/s."""
    assert written(value) == text


def test_only_a_record_of_the_same_tool_is_replaced() -> None:
    """Whatever else a file holds is the user's."""
    path = Path("found.json")
    record.check_target(path, "input")
    for content in ("{}", "[1]", "no JSON", '{"bench": "allreduce"}', "\x00"):
        path.write_text(content)
        with pytest.raises(UsageError, match=r"found\.json"):
            record.check_target(path, "input")
        assert path.read_text() == content
    path.write_text('{"bench": "input"}')
    record.check_target(path, "input")


@pytest.mark.parametrize("path", ["missing/found.json", "."])
def test_a_record_has_a_place(path: str) -> None:
    """A folder that is not there, or a folder itself, is told before anything is measured."""
    with pytest.raises(UsageError, match="--json"):
        record.check_target(Path(path), "input")

"""The values that a chart shows where the pointer is."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from hvd_train.report.charts import Axis, Chart, Series, styled
from hvd_train.report.drawing import svg

NAN = float("nan")


EPOCHS, LOSS = Axis("epochs"), Axis("loss")


def titles(*series: Series, x: Axis = EPOCHS, y: Axis = LOSS) -> list[list[str]]:
    """Return the lines of each stripe's title, from left to right."""
    return [text.splitlines() for text in re.findall(r"<title>(.*?)</title>", svg(Chart("", x, y, series)), re.DOTALL)]


def test_every_point_of_a_short_chart_has_its_values() -> None:
    """Each line's, as its axis writes them; a gap has none."""
    first = styled(0, "training", (1, 2, 3), (0.5, 0.25, NAN))
    second = styled(1, "validation", (1, 3), (0.75, 0.125))
    assert titles(first, second, y=Axis("top-1", number_format="share")) == [
        ["epochs 1", "training 50%", "validation 75%"],
        ["epochs 2", "training 25%"],
        ["epochs 3", "validation 12.5%"],
    ]


def test_a_line_without_a_name_has_its_value() -> None:
    """And a time is written as one."""
    alone = styled(0, "", (60, 120), (1500.0, 3000.0))
    assert titles(alone, x=Axis("time", number_format="duration"))[0] == ["time 1:00", " 1,500"]


@pytest.mark.parametrize("num_lines", [1, 20])
def test_a_long_chart_has_stripes_that_a_page_can_hold(num_lines: int) -> None:
    """They lie side by side over the whole plot, and the first and the last point are among what they show."""
    lines = [styled(n, f"run {n}", range(500), [n + 1.0] * 500) for n in range(num_lines)]
    drawn = svg(Chart("", Axis("steps"), Axis("loss"), tuple(lines)))
    found = [
        tuple(map(float, pair))
        for pair in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" [^>]*><title>', drawn)
    ]
    shown = titles(*lines, x=Axis("steps"))
    assert 8 <= len(found) == len(shown) <= 40
    assert all(len(lines_of_one) == 1 + num_lines for lines_of_one in shown)
    for (left, width), (right, _) in pairwise(found):
        assert left + width == pytest.approx(right, abs=0.11)
    assert (shown[0][0], shown[-1][0]) == ("steps 0", "steps 499")


def test_what_is_empty_has_no_values() -> None:
    """A chart without points."""
    assert titles(styled(0, "none", (1, 2), (NAN, NAN))) == titles() == []


def test_a_name_is_no_markup() -> None:
    """A folder may be called anything."""
    assert titles(styled(0, "<b>&", (1,), (1.0,)))[0] == ["epochs 1", "&lt;b&gt;&amp; 1"]

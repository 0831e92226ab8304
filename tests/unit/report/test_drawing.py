"""Drawn charts: what they show, and that they can be read without colour, by day and by night."""

from __future__ import annotations

import io
import re

import numpy as np
from PIL import Image

from hvd_train.report.charts import Axis, Chart, Event, Series, styled
from hvd_train.report.drawing import png, spread, svg

NAN = float("nan")


def chart(*series: Series, log: bool = False, title: str = "Loss", events: tuple[Event, ...] = ()) -> Chart:
    return Chart(title, Axis("epochs"), Axis("loss", log=log), series, events)


def line(*values: float | None, number: int = 0) -> Series:
    return styled(number, f"run {number}", range(len(values)), values)


def pieces(text: str) -> int:
    """Into how many pieces the one line of a chart falls: its path starts anew after each gap."""
    (path,) = re.findall(r'<path d="([^"]*)"[^>]*var\(--tone-0, #0063a6\); stroke-width: 1.5', text)
    return str(path).count("M")


def test_what_is_missing_is_a_gap() -> None:
    """Neither None nor NaN nor infinity is bridged, or drawn as a number."""
    assert pieces(svg(chart(line(1, 2, 3, 4, 5, 6, 7)))) == 1
    assert pieces(svg(chart(line(1, 2, None, 3, 4, NAN, 5, 6, float("inf"), 7, 8)))) == 4


def test_what_a_log_axis_cannot_show_is_a_gap() -> None:
    """Zero has no logarithm."""
    assert pieces(svg(chart(line(1, 2, 0, 3, 4), log=True))) == 2


def test_a_point_between_gaps_is_seen() -> None:
    """It is no line, so it has its marker even where the others have none."""
    whole, torn = ([*[0.5] * 20, gap, 0.7, gap, *[0.5] * 20] for gap in (0.5, None))
    drawn = [svg(chart(Series("", tuple(range(43)), tuple(values)))).count("<use") for values in (whole, torn)]
    assert drawn[1] == drawn[0] + 1


def test_what_is_empty_says_so() -> None:
    """A chart without series, one with nothing but gaps, and a series without values beside one that has some."""
    assert "no values" in svg(chart())
    assert "no values" in svg(chart(line(None, NAN)))
    beside = svg(chart(line(1, 2), line(None, None, number=1)))
    assert "run 1: no values" in beside
    assert "run 0: no values" not in beside


def test_colours_are_those_of_the_page() -> None:
    """Every colour of the SVG is a variable with a default, or there would be black on black at night."""
    text = svg(chart(line(1, 2, 3), line(3, 2, 1, number=1), events=(Event(1, "2→1"),)))
    assert "var(--ink" in text
    assert "var(--tone-1" in text
    assert not re.findall(r"#[0-9a-f]{6}", re.sub(r"var\(--[a-z0-9-]+, #[0-9a-f]{6}\)", "", text))
    assert "font-family" not in text


def test_charts_of_one_page_do_not_meet() -> None:
    """An id that two charts had would give one of them the other's clip path."""
    ids = [re.findall(r'id="([^"]*)"', svg(chart(line(1, 2, 3), title=title))) for title in ("Loss", "Top-1")]
    assert ids[0]
    assert not set(ids[0]) & set(ids[1])


def test_the_same_chart_is_the_same_text() -> None:
    """A report of the same runs does not differ from the last one."""
    assert svg(chart(line(1, 2, 3))) == svg(chart(line(1, 2, 3)))


def test_names_and_events_stand_in_the_chart() -> None:
    """As text, which can be searched and read aloud, with what HTML and mathematics would take for theirs."""
    text = svg(chart(styled(0, "a<b$c$", (0, 1), (1, 2)), events=(Event(0.5, "2→1"), Event(7, "beyond"))))
    assert "a&lt;b$c$" in text
    assert "2→1" in text
    assert "beyond" not in text
    assert 'aria-label="Loss: loss over epochs, of a&lt;b$c$"' in text


def test_a_picture_is_dark_on_white() -> None:
    """For papers and slides: large enough, white at its edge, with something on it."""
    picture = np.asarray(Image.open(io.BytesIO(png(chart(line(1, 2, 3))))).convert("L"))
    assert picture.shape[1] > 900
    assert picture[0].min() == 255
    assert picture.min() < 100


def test_labels_keep_apart_and_near() -> None:
    """Those that have room stay where they belong; a cluster spreads around its middle; none leaves the chart."""
    assert spread([0, 50, 100], 10, 0, 100) == [0, 50, 100]
    assert spread([50, 50, 50], 10, 0, 100) == [40, 50, 60]
    assert spread([99, 100], 10, 0, 100) == [90, 100]
    assert spread([0, 0], 10, 0, 100) == [0, 10]
    assert spread([], 10, 0, 100) == []

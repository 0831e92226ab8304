"""The pieces of the page: whatever text goes in stays text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from markupsafe import Markup

from hvd_train.report import page
from hvd_train.report.charts import Axis, Chart, styled

HOSTILE = """x" onload="alert(1)' onclick='alert(2) <script>alert(3)</script> &amp; {{ 7 * 7 }}"""


class Elements(HTMLParser):
    """The tags of a page with their attributes, and its text, as a browser reads them."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(str(markup))  # plain, or pieces of it would escape anew

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_hostile_name_stays_inside_its_attribute() -> None:
    """A class whose name has quotes is the title of its column; a line's name with quotes is the label of its chart."""
    titles = [found["title"] for _, found in Elements(page.matrix([HOSTILE], [[3]])).tags if "title" in found]
    assert titles == [HOSTILE]
    chart = Chart("Loss", Axis("epochs"), Axis("loss"), (styled(0, HOSTILE, (0, 1), (1, 2)),))
    elements = Elements(page.figures([chart]))
    labels = [found["aria-label"] for _, found in elements.tags if "aria-label" in found]
    assert labels == [f"Loss: loss over epochs, of {HOSTILE}"]
    assert not {name for _, found in elements.tags for name in found} & {"onload", "onclick"}


@pytest.mark.parametrize(
    "piece",
    [
        page.gap(HOSTILE),
        page.paragraph(HOSTILE),
        page.heading(HOSTILE),
        page.cards([(HOSTILE, HOSTILE)]),
        page.table([HOSTILE], [[HOSTILE, HOSTILE]]),
        page.shares([HOSTILE] * 2, [(HOSTILE, [(HOSTILE, 0.5)])]),
        page.pictures([(b"", HOSTILE)]),
        page.details(HOSTILE, page.paragraph(HOSTILE)),
        page.tabs([(HOSTILE, [])]),
        page.document(HOSTILE, HOSTILE, [(HOSTILE, page.heading(HOSTILE))]),
    ],
)
def test_a_hostile_text_is_shown_as_it_is(piece: str) -> None:
    """No piece lets a text become a tag or an attribute, or takes it for a template."""
    elements = Elements(piece)
    assert HOSTILE in elements.text
    assert "script" not in {tag for tag, _ in elements.tags}
    assert not {name for _, found in elements.tags for name in found} & {"onload", "onclick"}


def test_only_markup_is_taken_as_markup() -> None:
    """A plain string that looks like HTML is text even where markup is expected."""
    assert "<b>" in page.details("more", Markup("<b>body</b>"))
    assert "<b>" not in page.details("more", "<b>body</b>")  # type: ignore[arg-type]


def test_runs_that_miss_the_same_share_a_note() -> None:
    """Up to six of them are named, the others are counted; a note without a name stands alone."""
    notes = page.gaps([*((f"run {n}", "no metrics") for n in range(8)), ("", "no settings")])
    assert re.findall(r'<p class="gap">(.*)</p>', notes) == [
        "run 0, run 1, run 2, run 3, run 4, run 5 and 2 more: no metrics",
        "no settings",
    ]


def test_a_confusion_matrix_is_darker_where_more_images_are() -> None:
    """A cell shows its share of the row as colour, the diagonal has a frame, and a class may have no images."""
    cells = [found for tag, found in Elements(page.matrix(["a", "b", "c"], [[3, 1, 0], [0, 4, 0], [0, 0, 0]])).tags]
    depths = [re.search(r"(\d+)%", found["style"] or "") for found in cells if "style" in found]
    assert [depth[1] for depth in depths if depth] == ["45", "15", "60"]
    assert sum(found.get("class") == "right" for found in cells) == 3
    assert "<td>none</td>" in page.matrix(["a"], [[0]])


def test_the_page_needs_nothing_from_outside() -> None:
    """It asks for no script, font, style sheet or picture, and forbids all of them."""
    elements = Elements(page.document("title", "subtitle", [("one", page.paragraph("text")), ("two", Markup())]))
    assert {tag for tag, _ in elements.tags} >= {"style", "nav", "section"}
    assert "script" not in {tag for tag, _ in elements.tags}
    targets = [found[name] for _, found in elements.tags for name in ("href", "src") if name in found]
    assert targets == ["data:,", "#s0", "#s1"]
    policies = [found["content"] for _, found in elements.tags if found.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert "{%" not in elements.text


def test_values_as_people_write_them() -> None:
    """Settings without Python's words, and durations that no line break divides."""
    assert [page.written(value) for value in (True, None, [1, 2], (), 0.1)] == ["yes", "not set", "1 2", "none", "0.1"]
    assert page.written_duration(1.5) == "1.5\N{NO-BREAK SPACE}s"

"""Links, file names and flags in the documents exist."""

import re
from pathlib import Path

import pytest

from hvd_train.commands import tree

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TOPS = ("hvd_train", "tests", "benchmarks", "packaging", "examples")
FILES = [f"/{path.relative_to(ROOT)}" for top in TOPS for path in (ROOT / top).rglob("*.py")]
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of the headings: lower case, no punctuation, dashes for blanks."""
    headings = re.findall(
        r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_of_a_page_exist(page: Path) -> None:
    whole = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", whole)):
        if not re.match(r"\w+:", link):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    for name in re.findall(r"`([\w/]+\.py)`", whole):
        assert any(file.endswith(f"/{name}") for file in FILES), name


def test_the_index_links_to_each_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name}" not in index]
    assert sorted(missing) == ["index.md"]


TRAIN, LAUNCH = (
    {flag for action in tree.tree().commands[name].actions for flag in action.option_strings}
    for name in ("train", "launch")
)


@pytest.mark.parametrize(
    ("page", "cells", "known", "fewest"),
    [
        ("settings.md", r"^\| flag \| meaning \|$([\s\S]*?)^$", TRAIN, 30),
        ("coming_from.md", r"^\| .*? \| (.*)$", TRAIN | LAUNCH, 20),
    ],
)
def test_each_flag_in_the_tables_exists(
    page: str, cells: str, known: set[str], fewest: int
) -> None:
    """They are flags of train, or of launch."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    code = re.findall(r"`([^`]*)`", " ".join(re.findall(cells, text, re.MULTILINE)))
    flags = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(code)))
    assert len(flags) > fewest
    assert sorted(flags - known) == []

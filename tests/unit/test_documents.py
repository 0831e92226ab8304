"""Links, file names and flags in the documents exist."""

import re
from pathlib import Path

import pytest

from hvd_train.commands import tree

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
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
    tops = ("hvd_train", "tests", "benchmarks", "packaging", "examples")
    files = [
        f"/{path.relative_to(ROOT).as_posix()}"
        for top in tops
        for path in (ROOT / top).rglob("*.py")
    ]
    for name in re.findall(r"`([\w/]+\.py)`", whole):
        assert any(file.endswith(f"/{name}") for file in files), name


def test_the_index_links_to_each_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name}" not in index]
    assert sorted(missing) == ["index.md"]


def test_each_flag_in_the_tables_exists() -> None:
    """The flags of docs/settings.md, and those that docs/coming_from.md names, are
    flags of train or launch.
    """
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    settings = page[page.index("| flag | meaning |") :].partition("\n\n")[0]
    moved = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    here = " ".join(row.split(" | ", 1)[1] for row in moved.splitlines() if row.startswith("| "))
    known = {
        name: {flag for action in parser.actions for flag in action.option_strings}
        for name, parser in tree.tree().commands.items()
    }
    for table, allowed, fewest in (
        (settings, known["train"], 30),
        (here, known["train"] | known["launch"], 20),
    ):
        flags = set(
            re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(re.findall(r"`([^`]*)`", table)))
        )
        assert len(flags) > fewest
        assert sorted(flags - allowed) == []

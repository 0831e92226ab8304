"""The documents lead where they say: links, files and the functions that a page tells of."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import docs_site
import pytest
from PIL import Image

from hvd_train import config_file, own_loop, recipes
from hvd_train.commands.registry import COMMANDS
from hvd_train.commands.train import ALIASES, parse_train
from hvd_train.config import Config
from hvd_train.step import Slot, Step
from tests.support import documented, pictures, rooms

ROOT = Path(__file__).resolve().parents[2]
LINKED = [file for file in docs_site.files() if file.suffix == ".md"]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *LINKED})
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The names of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {docs_site.anchor(heading) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    """A link or picture in a document is a file of the repository and, after a #, a heading of it."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for link in [*re.findall(r"\]\(([^)\s]+)\)", text), *docs_site.links(text)]:
        if not re.match(r"\w+:", link):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize(
    ("heading", "name"),
    [("Images that are kept: `--cache`", "images-that-are-kept---cache"), ("What a job opens", "what-a-job-opens")],
)
def test_the_names_of_headings_are_those_of_github(heading: str, name: str) -> None:
    """Lower case, no punctuation, dashes for blanks."""
    assert docs_site.anchor(heading) == name


def test_every_page_can_be_reached_from_the_readme() -> None:
    """So the site has all of them: its pages are those to which the README leads."""
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in LINKED] == []


def test_the_index_names_every_page() -> None:
    """docs/index.md has a line for each page beside it."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name}" not in index]
    assert sorted(missing) == ["index.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_file_in_backticks_exists(page: Path) -> None:
    """What looks like a file of ours, `world/heartbeat.py` or `tests/contract.py`, is one, by the end of its path."""
    tops = ("hvd_train", "tests", "benchmarks", "packaging", "examples")
    files = [f"/{path.relative_to(ROOT).as_posix()}" for top in tops for path in (ROOT / top).rglob("*.py")]
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")):
        assert any(file.endswith(f"/{name}") for file in files), name


def test_each_name_in_the_change_of_world_is_defined_where_the_page_says() -> None:
    """In a table row of docs/change-of-world.md each function and constant is defined in one of the row's files."""
    page = (ROOT / "docs" / "change-of-world.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\|.*\.py`.*\|$", page, re.MULTILINE):
        names = re.findall(r"`([\w./]+)`", row)
        files = [name for name in names if name.endswith(".py")]
        source = "\n".join((ROOT / "hvd_train" / name).read_text(encoding="utf-8") for name in files)
        for name in (name for name in names if name not in files and not name.startswith(("HVD_", "HOROVOD_"))):
            last = name.rpartition(".")[2]
            defined = rf"\b(def|class) {last}\b|^\s*([\w, ]+, )?{last}\b[^\n(]* = |^ +{last}: "
            assert re.search(defined, source, re.MULTILINE), f"{name} is not defined in {files}"


def flags_in(text: str) -> set[str]:
    """The flags in the code of a text."""
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(re.findall(r"`([^`]*)`", text))))


@pytest.mark.parametrize(("page", "most"), [("README.md", 20), ("docs/settings.md", 60)])
def test_each_flag_in_a_table_is_one_of_train(page: str, most: int) -> None:
    """What the tables of flags say can be typed is a setting, or what people of other trainers type for one."""
    text = (ROOT / page).read_text(encoding="utf-8")
    flags = flags_in(text[text.index("| flag | meaning |") :].partition("\n\n")[0])
    known = {f"--{name.replace('_', '-')}" for name in recipes.digits().settings()}
    assert len(flags) > most
    assert sorted(flags - known - set(ALIASES)) == []


def test_each_picture_is_a_small_png_that_a_page_shows() -> None:
    """What a page shows is there, and what is there is shown; a clone stays small."""
    shown = set()
    for page in PAGES:
        for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            shown.add((page.parent / link).resolve())
    assert shown == set(pictures.PICTURES.iterdir())
    for path in shown:
        assert path.stat().st_size <= pictures.MOST_BYTES
        with Image.open(path) as image:
            image.load()
            assert (image.format, image.width > 800) == ("PNG", True)


COMING_FROM = documented.tables("coming-from.md")
OWNERS = {"session": own_loop.Session, "step": Step, "slot": Slot}


@pytest.mark.parametrize("heading", [heading for heading in COMING_FROM if heading != "What does not exist here"])
def test_what_others_type_has_a_counterpart_that_there_is(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In docs/coming-from.md each flag, setting and name of ours exists, with values that are taken."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(config_file.dump(recipes.digits()))
    ours = [code for _, here in COMING_FROM[heading] for code in re.findall(r"`([^`]+)`", here)]
    assert len(ours) > 15
    for code in ours:
        words = code.split()
        if words[0].startswith("--"):
            parse_train([*words] if words[0] == "--config" else ["digits", *words])
        elif words[:2] == ["hvd-train", "train"]:
            parse_train([word for word in words[2:] if word not in ("--np", "4", "--hosts", "hostfiles/two_hosts")])
        elif words[0] == "hvd-train":
            assert words[1] in COMMANDS, code
        elif scripts := [word for word in words if word.startswith("horovodrun_scripts/")]:
            script = (ROOT / scripts[0]).read_text(encoding="utf-8")
            options = re.findall(r" (--?[a-z][a-z-]*)", code.partition(f"{scripts[0]} ")[2].partition(" -- ")[0])
            assert [option for option in options if f"#   {option} " not in script] == [], code
        elif found := re.fullmatch(r"(\w+)=(\S+)", code):
            name, value = found.groups()
            if name not in inspect.signature(own_loop.session).parameters:
                assert name in own_loop._SETTINGS, code
                Config().replace(**config_file.typed({name: ast.literal_eval(value)}, "session"))
        elif found := re.match(r"(session|step|slot)\.(\w+)", code):
            owner = OWNERS[found[1]]
            assert hasattr(owner, found[2]) or f"self.{found[2]} = " in inspect.getsource(owner), code


def test_the_walks_of_a_newcomer_do_not_go_to_and_fro() -> None:
    """In each walk of docs/architecture.md no room is entered again more than once after it was left."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walks = re.split(r"^### ", page, flags=re.MULTILINE)[1:]
    assert len(walks) == 5
    for walk in walks:
        files = re.findall(r"^\d+\. `([\w/]+)\.py`:", walk, re.MULTILINE)
        found = [rooms.room_of(file.replace("/", ".")) for file in files]
        assert len(files) >= 3, walk
        assert None not in found, files
        visits = [room for room, before in zip(found, [None, *found], strict=False) if room != before]
        assert max(visits.count(room) for room in visits) <= 2, (walk.splitlines()[0], visits)

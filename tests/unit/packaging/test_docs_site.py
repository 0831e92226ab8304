"""The pages of the site: which there are, in what order, and where their links lead."""

from __future__ import annotations

import json
from pathlib import Path

import docs_site
import pytest
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

INDEX = """\
| you | read | and find |
|---|---|---|
| **train** | [README](../README.md) | the first |
| | [new.md](new.md) | a page that was added |
| **look** | [new.md](new.md#there) | it again |
| | [SECURITY](../SECURITY.md) | one beside docs/ |
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository in the place of ours."""
    root = tmp_path / "repository"
    texts = {
        "README.md": '[a](docs/a.md#there) [folder](examples/) <img src="docs/pictures/run.svg"> [x](https://x.org)',
        "docs/a.md": "[back](../README.md) [code](../examples/gan.py) [out](../../outside.md) [gone](gone.md)",
        "docs/pictures/run.svg": "<svg/>",
        "docs/alone.md": "no page leads here",
        "examples/README.md": "[gan](gan.py)\n```\n[in code](../docs/alone.md)\n```\n",
        "examples/gan.py": "print()\n",
        "../outside.md": "of another repository",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(docs_site, "ROOT", root)
    return root


def changed(markdown: str, of: str) -> str:
    """Return what the site makes of the text of a page."""
    config, files = MkDocsConfig(), Files([])
    file = File(of, str(docs_site.ROOT), "site", use_directory_urls=False)
    return docs_site.on_page_markdown(markdown, Page(None, file, config), config, files)


def test_pages_are_listed_once_in_the_order_and_the_groups_of_the_index() -> None:
    """A row more in docs/index.md is a page more of the site, without another list."""
    start, index, train, look, _, changes = docs_site.navigation(INDEX)
    assert (start, index, changes) == ({"Start": "README.md"}, "docs/index.md", "CHANGELOG.md")
    assert (train, look) == ({"Train": ["docs/new.md"]}, {"Look": ["SECURITY.md"]})


def test_the_site_has_what_the_start_page_leads_to_and_nothing_else(repository: Path) -> None:
    """Pages, pictures and sources, but no file outside of the repository, and none that is only named in code."""
    found = {path.relative_to(repository).as_posix() for path in docs_site.files()}
    pages = {"README.md", "docs/a.md", "examples/README.md"}
    assert found == {*pages, "docs/pictures/run.svg", "examples/gan.py"}


@pytest.mark.parametrize(
    ("markdown", "on_the_site"),
    [
        ("[code](../examples/gan.py)", "[code](../examples/gan.py.md)"),
        ("[all](../examples)", "[all](../examples/README.md)"),
        ("[all](../examples/)", "[all](../examples/README.md)"),
        ("[page](alone.md#x)", "[page](alone.md#x)"),
        ("![picture](pictures/run.svg)", "![picture](pictures/run.svg)"),
        ("[far](https://x.org/gan.py) [here](#there)", "[far](https://x.org/gan.py) [here](#there)"),
        ("```\n[code](../examples/gan.py)\n```\n", "```\n[code](../examples/gan.py)\n```\n"),
        ("| `a\\|b` | c\\|d |", "| `a|b` | c\\|d |"),
        ("`a\\|b`", "`a\\|b`"),
    ],
)
def test_links_and_bars_are_those_of_the_site(repository: Path, markdown: str, on_the_site: str) -> None:
    """A source file is shown by a page, a folder by its README; a bar in a table's code has no backslash."""
    assert changed(markdown, "docs/index.md") == on_the_site


def test_a_source_is_shown_with_its_name_and_its_language(repository: Path) -> None:
    """The page of a program has it as code."""
    text = docs_site.source_page(repository / "examples" / "gan.py")
    assert text == "# examples/gan.py\n\n````py\nprint()\n````\n"


def test_a_notebook_is_shown_as_its_reader_sees_it(repository: Path) -> None:
    """Its text, its code, what that has printed and the pictures that it has drawn."""
    drawn = {"output_type": "display_data", "data": {"image/png": "iVBO\nRw0K\n", "text/plain": ["<Figure>"]}}
    printed = {"output_type": "stream", "text": ["one\n", "two\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Curves\n", "of a run"]},
        {"cell_type": "code", "source": ["draw()\n", "tell()"], "outputs": [printed, drawn]},
    ]
    path = repository / "examples" / "results.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert docs_site.source_page(path) == (
        "# Curves\nof a run\n\n```python\ndraw()\ntell()\n```\n\n```text\none\ntwo\n```\n\n"
        "![What this has drawn](data:image/png;base64,iVBORw0K)"
    )

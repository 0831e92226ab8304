"""The pages of the documentation site, for MkDocs, which calls the functions `on_...` (see mkdocs.yml).

The site has the pages that the README leads to, laid out as in the repository, so that the links in them hold here and
there. The order is that of the table in docs/index.md. The reference pages are made when the site is built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docs_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
START, INDEX, CHANGES = "README.md", "docs/index.md", "CHANGELOG.md"
REFERENCE = {
    "reference/flags.md": docs_reference.flags,
    "reference/scripts.md": docs_reference.scripts,
    "reference/api.md": docs_reference.api,
}
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\(|(?:src|srcset)=\")(?!\w+:|#)([^)\"\s#]+)")
_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_PICTURES = (".gif", ".jpg", ".png", ".svg", ".webp")
_LANGUAGES = {".sbatch": "bash", ".sh": "bash"}


def links(text: str) -> Iterator[str]:
    """Yield the relative addresses to which a page of Markdown leads, and those of its pictures."""
    for _, address in _LINK.findall(_FENCED.sub("", text)):
        yield address


def files() -> set[Path]:
    """Return the files that the start page leads to, directly or by other pages; README.md for a folder.

    A link that leads to no file is left out: MkDocs tells of it.
    """
    found, left = set[Path](), [ROOT / START]
    while left:
        file = left.pop()
        file = file / "README.md" if file.is_dir() else file
        if file not in found and file.is_file() and file.is_relative_to(ROOT):
            found.add(file)
            if file.suffix == ".md":
                left += [(file.parent / address).resolve() for address in links(file.read_text(encoding="utf-8"))]
    return found


def navigation(index: str) -> list[Any]:
    """Return the pages in the order of the table in docs/index.md, with its groups, each page once."""
    groups: list[tuple[str, list[str]]] = []
    seen = {START}
    for title, address in re.findall(r"^\| (?:\*\*(.+?)\*\*)? *\| \[.*?\]\(([^)#]+)", index, re.MULTILINE):
        if title:
            groups.append((f"{title[:1].upper()}{title[1:]}", []))
        page = (ROOT / INDEX).parent.joinpath(address).resolve().relative_to(ROOT).as_posix()
        if page not in seen:
            seen.add(page)
            groups[-1][1].append(page)
    listed = [{title: pages} for title, pages in groups if pages]
    return [{"Start": START}, INDEX, *listed, {"Reference": [*REFERENCE]}, CHANGES]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name headings as GitHub does, which the links in the pages go by, and set the order of the pages."""
    config.mdx_configs["toc"]["slugify"] = lambda heading, separator: anchor(heading)
    config.nav = navigation((ROOT / INDEX).read_text(encoding="utf-8"))
    return config


def anchor(heading: str) -> str:
    """Return the name that GitHub gives to a heading: lower case, no punctuation, dashes for blanks."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def on_files(found: Files, config: MkDocsConfig) -> Files:
    """Return the files of the site: the theme's, and in the place of docs/ alone all that the start page leads to."""
    for file in [file for file in found if file.src_dir == config.docs_dir]:
        found.remove(file)
    for path in sorted(files()):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in (".md", *_PICTURES):
            found.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
        else:
            found.append(File.generated(config, f"{name}.md", content=source_page(path)))
    for name, make in REFERENCE.items():
        found.append(File.generated(config, name, content=make()))
    return found


def source_page(path: Path) -> str:
    """Return a page that shows a file of the repository; a notebook as its reader sees it."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return "\n\n".join(part for cell in cells for part in _cell(cell))
    language = _LANGUAGES.get(path.suffix, path.suffix[1:])
    return f"# {path.relative_to(ROOT).as_posix()}\n\n````{language}\n{path.read_text(encoding='utf-8')}````\n"


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    """Yield a cell of a notebook as Markdown: its text, or its code and what that has shown."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        yield source
        return
    yield f"```python\n{source}\n```"
    printed = "".join("".join(output.get("text", ())) for output in cell["outputs"])
    if printed:
        yield f"```text\n{printed.rstrip()}\n```"
    for output in cell["outputs"]:
        if "image/png" in output.get("data", {}):
            yield f"![What this has drawn](data:image/png;base64,{''.join(output['data']['image/png'].split())})"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to other files of the repository than pages lead to the pages that show these.

    In code in a table a bar has a backslash on GitHub, and here none.
    """
    if page.file.src_dir is None:  # made here, with links that hold
        return markdown
    folder = ROOT.joinpath(page.file.src_uri).parent

    def changed(match: re.Match[str]) -> str:
        target = folder / match[2]
        if target.is_dir():
            return f"{match[0].removesuffix('/')}/README.md"
        return match[0] if target.suffix in (".md", *_PICTURES) or not target.is_file() else f"{match[0]}.md"

    def of_prose(text: str) -> str:
        return _ROW.sub(_with_bare_bars, _LINK.sub(changed, text))

    return "".join(part if number % 2 else of_prose(part) for number, part in enumerate(_FENCED.split(markdown)))


def _with_bare_bars(row: re.Match[str]) -> str:
    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])

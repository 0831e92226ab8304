"""Commands as the documents print them, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def commands(page: str) -> dict[str, list[str]]:
    """Return for each heading of a page that has any the lines of the code blocks below it, without comments."""
    found = {}
    for section in (DOCS / page).read_text(encoding="utf-8").split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        blocks = re.findall(r"^```\w*\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
        if lines := [line for line in lines if line]:
            found[heading] = lines
    return found


def program(name: str) -> str:
    """Return the Python program of the README or of a page that begins with its name in a comment."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))))
    blocks = re.findall(r"^```python\n(.*?)^```", pages, re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if block.startswith(f"# {name}: ")]
    return str(found)


def tables(page: str) -> dict[str, list[list[str]]]:
    """Return for each heading of a page that has a table the cells of its rows, without the first."""
    found = {}
    for section in (DOCS / page).read_text(encoding="utf-8").split("\n## ")[1:]:
        rows = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in re.findall(r"^\|.*\|$", section, re.MULTILINE)]
        if rows:
            found[section.partition("\n")[0]] = rows[2:]
    return found


def missing(found: dict[str, Any]) -> set[str]:
    """Return the numbers that docs/measuring.md explains and that a record of `hvd-train bench` lacks."""
    section = (DOCS / "measuring.md").read_text().partition(f": `{found['bench']}`\n")[2].partition("\n## ")[0]
    explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))
    stages = {row["stage"] for row in found.get("stages", [])} | {"items", "decode", "header", "collate", "transfer"}
    known = set(found) | {key for row in found.get("rows", []) for key in row} | stages | {"random"}
    return explained - known - {"numbers"}

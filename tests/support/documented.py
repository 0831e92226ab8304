"""Commands as printed in the documents."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def commands(page: str) -> dict[str, list[str]]:
    """Return for each heading of a page the lines of its code blocks, without comments."""
    found = {}
    for section in (DOCS / page).read_text(encoding="utf-8").split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        blocks = re.findall(r"^```\w*\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
        if lines := [line for line in lines if line]:
            found[heading] = lines
    return found

#!/usr/bin/env python3
"""Write the pages of the web site into build/pages; `make docs` makes build/site of them.

They lie as in the clone, so links hold. docs/flags.md, commands.md and api.md are made from the
code, without torch.
"""

import os
import re
import shutil
from pathlib import Path

import hvd_train
from hvd_train.commands import tree
from hvd_train.errors import Parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
# Part of the API, though not made by name.
ALSO = ("loops.Epoch", "loops.Step", "loops.Update", "loops.MicroBatch")
STYLE = ".md-grid { max-width: 76rem } td:first-child code { white-space: nowrap }\n"


def printed_help(parser: Parser) -> str:
    """Return what a command prints for `--help`."""
    os.environ["COLUMNS"] = "80"
    return re.sub(" +\n", "\n", parser.format_help()).rstrip()


def flags() -> str:
    """Return the page of all settings."""
    text = (
        "# Flags of a training\n\nA [recipe](settings.md) sets many of them: "
        "`hvd-train config NAME`.\n"
    )
    return f"{text}\n```text\n{printed_help(tree.tree().commands['train'])}\n```\n"


def commands() -> str:
    """Return the page of all commands: what their `--help` prints."""
    text = "# Commands\n"
    for parser in tree.parsers(tree.tree()):
        body, more, _ = printed_help(parser).partition("\ndata:\n")
        text += f"\n## {parser.prog}\n\n```text\n{body.rstrip()}\n```\n"
        text += "\n[All flags](flags.md)\n" if more else ""
    return text


def api() -> str:
    """Return the page of the public names, which mkdocstrings fills from the sources."""
    names = [*(name for name in hvd_train.__all__ if not name.startswith("_")), *ALSO]
    return "# Python API\n\n" + "\n".join(
        f"::: hvd_train.{name}\n" for name in sorted(names, key=str.lower)
    )


def main() -> None:
    """Write the pages."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, PAGES / name)
    made = {"flags": flags, "commands": commands, "api": api}
    texts = {PAGES / "docs" / f"{name}.md": page() for name, page in made.items()}
    for page in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        ROOT / "tests" / "fake_gpu" / "README.md",
    ]:
        # Only GitHub needs a backslash before a bar in the code of a table.
        text = re.sub(
            r"^\|.*",
            lambda row: row[0].replace(r"\|", "|"),
            page.read_text(encoding="utf-8"),
            flags=re.M,
        )
        texts[PAGES / page.relative_to(ROOT)] = text
    for path, text in {**texts, PAGES / "style.css": STYLE}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""The page that `--help` prints: what stands in it, and that it fits a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hvd_train.help_page import Flag, Page, Section, flags_of, page_of


@dataclass(frozen=True)
class Options:
    """Draw a table.

    It has rows.
    """

    file: Annotated[Path, tyro.conf.Positional]
    """Where the table is."""
    num_rows: int = 3
    """How many rows,
    at most."""
    title: str | None = None
    """What stands above."""
    second_title: str | None = None
    """What stands below; default: nothing."""
    shape: Literal["round", "square"] = "round"
    """Its corners."""
    lines: bool = True
    """Draw lines."""
    sizes: tuple[float, ...] = ()
    """Widths of the columns."""


def test_a_field_is_a_flag_with_its_text_type_and_default() -> None:
    """In words, and with the values that are to be shown in place of those of the class."""
    flags = flags_of(Options, Options(Path("a"), num_rows=5), {"--num-rows": ("-n",)}, arguments=["FILE"])
    assert flags == {
        "file": Flag(("FILE",), "", "Where the table is."),
        "num_rows": Flag(("--num-rows", "-n"), "INT", "How many rows, at most. (default: 5)"),
        "title": Flag(("--title",), "TEXT or none", "What stands above. (default: none)"),
        "second_title": Flag(("--second-title",), "TEXT or none", "What stands below; default: nothing."),
        "shape": Flag(("--shape",), "round|square", "Its corners. (default: round)"),
        "lines": Flag(("--lines", "--no-lines"), "", "Draw lines. (default: on)"),
        "sizes": Flag(("--sizes",), "FLOAT ...", "Widths of the columns. (default: none)"),
    }


def test_a_page_says_what_the_command_does_before_its_flags() -> None:
    """Texts stand in one column, on the line of the flag where this is short."""
    page = page_of(Options, "draw FILE [FLAGS]", ("hvd-train draw a",), "FILE").text()
    assert page.startswith(
        "usage: hvd-train draw FILE [FLAGS]\n\n"
        "Draw a table. It has rows.\n\n"
        "  hvd-train draw a\n\n"
        "arguments:\n"
        "  FILE                    Where the table is.\n\n"
        "flags:\n"
        "  --num-rows INT          How many rows, at most. (default: 3)\n"
        "  --title TEXT or none    What stands above. (default: none)\n"
        "  --second-title TEXT or none\n"
        "                          What stands below; default: nothing.\n"
    )
    assert page.endswith("\n\n  -h, --help              Show this help.\n")


def test_no_line_is_longer_than_80_columns() -> None:
    """Long names, texts and uses go on in the next line."""
    long = Flag(tuple(f"--name-number-{number}" for number in range(9)), "|".join(["choice"] * 5), "word " * 50)
    page = Page("command " * 20, "sentence " * 30, (Section("title", (long,), "about " * 30),)).text()
    assert max(map(len, page.splitlines())) <= 80
    assert page.count("word") == 50

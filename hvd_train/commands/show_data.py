"""`hvd-train show-data`: the images and classes that a training would see, as a picture and a table."""

from __future__ import annotations

from pathlib import Path

from hvd_train import console
from hvd_train.commands.train import TRUST, parse_train
from hvd_train.console import PROGRAM
from hvd_train.flags import take, take_number, take_switch
from hvd_train.help_page import Flag, Page, Section

USAGE = """\
  show-data [RECIPE]       the images as the model sees them, as a picture
"""


def run(arguments: list[str]) -> int:
    """Write the picture, print each rank's classes and return 0.

    Raises UsageError for settings that cannot give a run, and for a picture that cannot be written.
    """
    ranks, arguments = take_number(arguments, "--ranks", 1)
    output, arguments = take(arguments, "--output", "the path of a picture")
    trust, arguments = take_switch(arguments, "--trust")
    settings = parse_train(arguments, "show-data", trust=trust)
    from hvd_train.report.samples import show  # imports torch, which parsing can do without
    from hvd_train.run import check

    check(settings)
    console.show(show(settings, ranks, Path(output or "show-data.png")))
    return 0


def page(arguments: list[str]) -> Page:
    """Return the help."""
    flags = (
        Flag(("--ranks",), "N", "Count the classes that each of N ranks takes. (default: 1)"),
        Flag(("--output",), "FILE", "The picture. (default: show-data.png)"),
        TRUST,
    )
    return Page(
        "show-data [RECIPE] [FLAGS]",
        "Draw the first training images as the model will see them, with their labels, and print how many samples of "
        "each class each rank takes.",
        (Section("flags", flags),),
        (f"{PROGRAM} show-data digits --ranks 4", f"{PROGRAM} show-data --data folder --data-dir DATA --mixup 0.2"),
        takes_settings=True,
    )

"""`hvd-train show-data`: the images and classes that a training would see, as a picture and a table."""

from pathlib import Path

from hvd_train import console
from hvd_train.commands.train import parse_train
from hvd_train.flags import take, take_number, take_switch

USAGE = """\
  show-data [RECIPE] [flags] [--ranks N] [--output FILE.png]
                           a picture of an augmented batch, and each rank's share of the classes
"""


def run(arguments: list[str]) -> int:
    """Write the picture, print each rank's classes and return 0. Raises UsageError for wrong settings or output."""
    ranks, arguments = take_number(arguments, "--ranks", 1)
    output, arguments = take(arguments, "--output", "the path of a picture")
    trust, arguments = take_switch(arguments, "--trust")
    settings = parse_train(arguments, "show-data", trust=trust)
    from hvd_train.report.samples import show  # imports torch
    from hvd_train.run import check

    check(settings)
    console.show(show(settings, ranks, Path(output or "show-data.png")))
    return 0

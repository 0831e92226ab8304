"""`hvd-train config`: the settings of a training, checked and printed without starting one."""

from __future__ import annotations

from hvd_train import config_file
from hvd_train.commands.train import TRUST, parse_train
from hvd_train.console import PROGRAM
from hvd_train.flags import take_switch
from hvd_train.help_page import Page, Section

USAGE = """\
  config [RECIPE] [FLAGS]  check the settings of a training, and print them
"""


def run(arguments: list[str]) -> int:
    """Check the settings, print them as YAML and return 0. Raises UsageError for settings that cannot give a run."""
    trust, arguments = take_switch(arguments, "--trust")
    settings = parse_train(arguments, "config", trust=trust)
    from hvd_train.run import check  # imports torch, which parsing can do without

    check(settings)
    print(config_file.dump(settings), end="")
    return 0


def page(arguments: list[str]) -> Page:
    """Return the help."""
    return Page(
        "config [RECIPE] [FLAGS]",
        "Check the settings of a training and print them, in the form that `--config FILE` takes. Nothing is started.",
        (Section("flags", (TRUST,)),),
        (f"{PROGRAM} config digits --epochs 5 > mine.yaml", f"{PROGRAM} train --config mine.yaml"),
        takes_settings=True,
    )

"""`hvd-train config`: the settings of a training, checked and printed without starting one."""

from __future__ import annotations

from hvd_train import config_file
from hvd_train.commands.train import parse_train

USAGE = """\
  config [RECIPE] [flags]  check the settings of `train` and print them in the form that --config FILE takes
"""


def run(arguments: list[str]) -> int:
    """Check the settings, print them as YAML and return 0. Raises UsageError for settings that cannot give a run."""
    settings = parse_train(arguments, "config")
    from hvd_train.run import check  # imports torch, which parsing can do without

    check(settings)
    print(config_file.dump(settings), end="")
    return 0

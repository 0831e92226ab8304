"""`hvd-train config`: the settings of a training, checked and printed without starting one."""

from hvd_train import config_file
from hvd_train.commands.train import parse_train
from hvd_train.flags import take_switch

USAGE = "  config [RECIPE] [flags]  check the settings of `train` and print them in the form that --config FILE takes\n"


def run(arguments: list[str]) -> int:
    """Check the settings, print them as YAML and return 0. Raises UsageError for wrong settings."""
    trust, arguments = take_switch(arguments, "--trust")
    settings = parse_train(arguments, "config", trust=trust)
    from hvd_train.run import check  # imports torch

    check(settings)
    print(config_file.dump(settings), end="")
    return 0

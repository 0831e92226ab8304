"""`hvd-train tune`: find Horovod's fastest settings for these hosts, this model and this batch."""

from __future__ import annotations

import os
from pathlib import Path

from hvd_train.bench import tune
from hvd_train.commands.train import parse_train
from hvd_train.console import PROGRAM, show
from hvd_train.errors import UsageError
from hvd_train.flags import take, take_number
from hvd_train.help_page import Flag, Page, Section
from hvd_train.launch import horovodrun, hosts, launcher, roll_call

USAGE = """\
  tune [RECIPE] [FLAGS]    find Horovod's fastest settings for these hosts
"""


def run(arguments: list[str]) -> int:
    """Start ranks again and again with other settings, write the fastest into a file and return 0.

    Raises UsageError for flags that cannot be, and under a launcher: tune starts the ranks itself.
    """
    if launcher.launched(os.environ) is not None:
        return _turn(arguments)
    file, arguments = take(arguments, "--hosts", "a host file")
    controller, arguments = take(arguments, "--controller", "gloo or mpi")
    output, arguments = take(arguments, "--output", "the path of a file")
    slots = 2 if file is None else sum(host.slots for host in hosts.read(Path(file)))
    if controller not in (None, "gloo", "mpi"):
        raise UsageError(f"--controller {controller}: it must be gloo or mpi")
    ranks, arguments = take_number(arguments, "--np", slots, least=2)
    turns, arguments = take_number(arguments, "--turns", 8, least=2)
    seconds, arguments = take_number(arguments, "--seconds", 3)
    parse_train(list(arguments), "tune")  # a mistake is reported before any rank starts
    path = Path(output or "tuned.env")
    tune.check(path)
    line = horovodrun.line(ranks, file, controller or "gloo")
    tune.tune(tune.Ranks(line, [horovodrun.program(PROGRAM), "tune", *arguments], seconds), path, turns, show)
    return 0


def page(arguments: list[str]) -> Page:
    """Return the help."""
    flags = (
        Flag(("--np",), "N", "Ranks to start. (default: 2, or all slots of --hosts)"),
        Flag(("--hosts",), "FILE", "Start them on the hosts of this file."),
        Flag(("--controller",), "gloo|mpi", "How ranks find one another, and sum on CPUs. (default: gloo)"),
        Flag(("--output",), "FILE", "Where the settings are written. (default: tuned.env)"),
        Flag(("--turns",), "N", "How often the best settings are compared with the defaults. (default: 8)"),
        Flag(("--seconds",), "N", "How long each turn takes, about. (default: 3)"),
    )
    return Page(
        "tune [RECIPE] [FLAGS]",
        "Find Horovod's fastest settings for these hosts, this model and this batch. `train --tuned FILE` takes them.",
        (Section("flags", flags),),
        (f"{PROGRAM} tune digits --np 2", f"{PROGRAM} train digits --np 2 --tuned tuned.env"),
        takes_settings=True,
    )


def _turn(arguments: list[str]) -> int:
    """Measure one turn on one of the ranks that `tune` has started. Raises UsageError where it has not."""
    seconds = os.environ.get(tune.TURN)
    if seconds is None:
        raise UsageError(f"tune starts the ranks by itself, many times: type `{PROGRAM} tune --np N`")
    settings = parse_train(arguments, "tune")
    roll_call.started(os.environ)
    from hvd_train.bench import turn  # imports torch, which parsing can do without

    turn.take(settings, float(seconds))
    return 0

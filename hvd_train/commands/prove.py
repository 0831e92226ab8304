"""`hvd-train prove COMMAND`: whether a script computes the same, whatever happens to its ranks."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from hvd_train.console import PROGRAM, show
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags
from hvd_train.launch import launcher, start


@dataclass(frozen=True)
class ProveOptions:
    """Run a script alone, stopped and resumed, on several ranks, and with a worker killed; compare the results.

    `hvd-train prove python mine.py --epochs 2`: the script takes the flags of a run (`hvd_train.parse_args`), or is
    `hvd-train train`. Exit code 1 if results differ. Keep it short: rounding grows with each step.
    """

    np: int = 3
    """Ranks, on this machine."""
    tolerance: float = 1e-5
    """How far a number may differ with another number of ranks, relative to the largest of its tensor, or to 1."""


def prove(arguments: list[str]) -> int:
    """Print what each run gives; return 1 if one differs. Raises UsageError if a run fails."""
    begin = 0
    while begin < len(arguments) and arguments[begin].startswith("-") and arguments[begin] != "--":
        begin += 1 if "=" in arguments[begin] or arguments[begin] in ("-h", "--help") else 2
    options, command = parse_flags(ProveOptions, arguments[:begin], f"{PROGRAM} prove"), arguments[begin:]
    command = command[command[:1] == ["--"] :]
    if options.np < 1:
        raise UsageError(f"--np is {options.np}; it must be at least 1")
    if not command:
        raise UsageError(f"name the script: {PROGRAM} prove python mine.py")
    command = ["python", *command] if command[0].endswith(".py") else command
    if "/" not in command[0]:
        command[0] = launcher.program(command[0])  # of this environment, which may not be activated
    from hvd_train.proof import Run, differences, kill_a_worker  # it imports torch

    folder, ranks = Path(mkdtemp(prefix="hvd-train-prove-")), str(options.np)
    several = start.horovodrun(options.np, (), "gloo")
    elastic = [launcher.program(PROGRAM), "launch", "--elastic", "--np", ranks, "--restarts", "1", "--"]

    alone = Run(folder / "alone", command)
    if failed := alone.complete():
        raise UsageError(failed)
    half, same, others = len(alone.steps) // 2, True, options.tolerance
    show(f"{'alone':<20} {len(alone.steps)} steps")
    for name, line, disturb, tolerance in (
        ("stopped and resumed", command, subprocess.Popen.terminate, 0.0),
        (f"{ranks} ranks", [*several, *command], None, others),
        ("a worker killed", [*elastic, *command], kill_a_worker, others),
    ):
        run = Run(folder / name.replace(" ", "-"), line)
        failed = run.complete(half, disturb)
        found = [failed] if failed else differences(alone, run, tolerance)
        equal = "the same to the bit" if tolerance == 0 else f"the same within {tolerance:g}"
        show(f"{name:<20} {'; '.join(found) or equal}")
        same = same and not found
    show(f"all runs are in {folder}")
    return 0 if same else 1

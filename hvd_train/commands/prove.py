"""`hvd-train prove COMMAND`: whether a script computes the same, whatever happens to its ranks."""

import subprocess
from argparse import REMAINDER
from pathlib import Path
from tempfile import mkdtemp

from hvd_train.console import PROGRAM, show
from hvd_train.errors import Parser, UsageError, from_one
from hvd_train.launch import launcher, start

_ABOUT = """Run a script alone, stopped and resumed, on several ranks, and with a worker killed; compare the results.
`hvd-train prove python mine.py --epochs 2`: the script takes the flags of a run (`hvd_train.parse_args`), or is
`hvd-train train`. Exit code 1 if results differ. Keep it short: rounding grows with each step."""
_TOLERANCE = "how far a number may differ with another number of ranks, relative to the largest of its tensor, or to 1"


def prove(arguments: list[str]) -> int:
    """Print what each run gives; return 1 if one differs. Raises UsageError if a run fails."""
    parser = Parser(prog=f"{PROGRAM} prove", description=_ABOUT)
    parser.add_argument("--np", type=from_one, default=3, metavar="N", help="ranks, on this machine (3)")
    parser.add_argument("--tolerance", type=float, default=1e-5, metavar="X", help=f"{_TOLERANCE} (1e-5)")
    parser.add_argument("command", nargs=REMAINDER, help="the script and its arguments")
    options = parser.parse_args(arguments)
    command = options.command[options.command[:1] == ["--"] :]
    if not command:
        raise UsageError(f"name the script: {PROGRAM} prove python mine.py")
    command = ["python", *command] if command[0].endswith(".py") else command
    if "/" not in command[0]:
        command[0] = launcher.program(command[0])  # of this environment, which may not be activated
    from hvd_train.proof import Run, differences, kill_a_worker  # it imports torch

    folder, ranks = Path(mkdtemp(prefix="hvd-train-prove-")), str(options.np)
    several = start.horovodrun(options.np, (), "gloo")
    elastic = [launcher.program(PROGRAM), "launch", "--elastic", "--np", ranks, "--"]

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

"""`hvd-train prove COMMAND`: whether a script computes the same, whatever happens to its ranks."""

import subprocess
from argparse import Namespace
from pathlib import Path
from tempfile import mkdtemp

from hvd_train.console import PROGRAM, show
from hvd_train.errors import UsageError
from hvd_train.launch import start


def prove(options: Namespace) -> int:
    """Print what each run gives; return 1 if one differs. Raises UsageError if a run fails."""
    command = options.command[options.command[:1] == ["--"] :]
    if not command:
        raise UsageError(f"name the script: {PROGRAM} prove python mine.py")
    command = ["python", *command] if command[0].endswith(".py") else command
    if "/" not in command[0]:
        command[0] = start.program(command[0])  # of this environment, which may not be activated
    if options.np < 2:
        raise UsageError("--np 1: a proof takes 2 ranks or more")
    # imports torch
    from hvd_train.proof import IN_ANOTHER_ORDER, Run, depends_on_order, differences, kill_a_worker

    folder = Path(mkdtemp(prefix="hvd-train-prove-"))
    ranks = str(options.np)
    several = start.horovodrun(options.np, (), "gloo")
    # With --min-np the survivors wait for the replacement of the killed worker.
    elastic = [
        start.program(PROGRAM),
        "launch",
        "--elastic",
        "--np",
        ranks,
        "--min-np",
        ranks,
        "--",
    ]

    alone = Run(folder / "alone", command)
    control = Run(folder / "another-order", command, IN_ANOTHER_ORDER)
    for run in (alone, control):
        if failed := run.complete():
            raise UsageError(failed)
        run.check_settings(options.np)
    half = alone.num_steps // 2
    is_exact = alone.is_exact
    others = options.tolerance
    if others is None:
        others = 0.0 if is_exact else 1e-5
    depends = depends_on_order(alone, control, others)
    show(f"{'alone':<20} {alone.num_steps} steps")
    if depends:
        show(f"{'another order':<20} the order of the micro-batches matters: {depends}")
    same = not depends
    may_be_rounding = False
    for name, line, disturb, tolerance in (
        ("stopped and resumed", command, subprocess.Popen.terminate, 0.0),
        (f"{ranks} ranks", [*several, *command], None, others),
        ("a worker killed", [*elastic, *command], kill_a_worker, others),
    ):
        run = Run(folder / name.replace(" ", "-"), line)
        failed = run.complete(half, disturb)
        if not failed and disturb is kill_a_worker and not run.newcomers:
            failed = "no replacement has joined: let the script take more steps"
        found, note = (
            ([failed], "")
            if failed
            else differences(alone, run, tolerance, None if depends else control)
        )
        equal = "the same to the bit" if tolerance == 0 else f"the same within {tolerance:g}"
        equal += f", but for rounding: {note}" if note else ""
        show(f"{name:<20} {'; '.join(found) or equal}")
        same = same and not found
        may_be_rounding |= bool(found) and not failed and tolerance > 0 and not is_exact
    if may_be_rounding:
        show("to rule out rounding add --reduction exact: then all runs must be equal to the bit")
    show(f"all runs are in {folder}")
    return 0 if same else 1

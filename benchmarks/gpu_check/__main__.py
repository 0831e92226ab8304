"""Check real GPUs: `make gpu-check`, or python -m benchmarks.gpu_check [--stages sums,equality] [--minutes 10].

The stages run one after another; each check in them passes, fails, or cannot be made here. A table comes at the end,
and the record (one JSON file) is whole after each check. A wrong sum over the ranks ends everything. Exit code 0:
nothing has failed; 1: something has; 2: nothing could be checked.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from rich.console import Console

from benchmarks.gpu_check import machine
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.site import PROGRAMS, Site
from benchmarks.speed import ENVIRONMENT
from hvd_train.doctor.children import children
from hvd_train.errors import UsageError

STAGES = ("doctor", "sums", "equality", "faults", "speed", "input", "memory")
ROOT = Path(__file__).parents[2]


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Return what the command line says; a wrong one ends the process with a line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", default=",".join(STAGES), help=f"some of {','.join(STAGES)} (default: all)")
    parser.add_argument("--minutes", type=float, default=10, help="that a stage may take (default: 10)")
    parser.add_argument("--hosts", type=Path, help="a host file; this folder and --folder must be on all of its hosts")
    parser.add_argument("--folder", type=Path, help="for the record and all output (default: build/gpu-check/TIME)")
    parser.add_argument("--short", action="store_true", help="the smallest sizes: to try the check, not the GPU")
    options = parser.parse_args(arguments)
    options.stages = options.stages.split(",")
    if unknown := [stage for stage in options.stages if stage not in STAGES]:
        parser.error(f"--stages: there is no stage {unknown[0]!r}; they are {', '.join(STAGES)}")
    if options.minutes <= 0:
        parser.error(f"--minutes takes a number above 0, not {options.minutes:g}")
    if options.hosts and not options.hosts.is_file():
        parser.error(f"--hosts: there is no host file {options.hosts}")
    return options


def main(arguments: list[str]) -> int:
    """Run the stages and return the exit code."""
    options = options_of(arguments)
    signal.signal(signal.SIGTERM, _leave)
    console = Console(highlight=False)
    with children(ENVIRONMENT) as group:
        try:
            found = machine.examine(group, options.hosts)
        except UsageError as error:
            print(f"gpu-check: {error}", file=sys.stderr)
            return 2
        folder = (options.folder or ROOT / "build" / "gpu-check" / time.strftime("%Y%m%d-%H%M%S")).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        site = Site(found, folder, group, options.minutes, options.short)
        record = Record(folder / "record.json", found, arguments)
        console.print(
            f"{len(found.gpus)} x {found.gpus[0]}, {found.about_ranks}; record: {record.path}", soft_wrap=True
        )
        run(options.stages, site, record, console)
    verdict = record.close()
    console.print(record.table())
    console.print(f"{verdict}; record: {record.path}", soft_wrap=True)
    return 1 if verdict == "failed" else 0


def run(stages: list[str], site: Site, record: Record, console: Console) -> None:
    """Run the stages, in their own order; after a wrong sum those that are left cannot be made."""
    wrong_sum = False
    for name in sorted(stages, key=STAGES.index):
        if wrong_sum:
            record.leave_out(name, "sums over the ranks are wrong: whatever else is seen means nothing")
            continue
        record.begin(name)
        site.begin_stage()
        for finding in importlib.import_module(f"benchmarks.gpu_check.stages.{name}").checks(site):
            record.add(finding)
            console.print(f"{name}: {finding.name}: {finding.verdict}: {finding.what}", markup=False, soft_wrap=True)
        wrong_sum = record.end() == "failed" and name == "sums"


def _leave(number: int, _frame: FrameType | None) -> None:
    """Unwind the stack at SIGTERM, so that the child processes end, too."""
    sys.exit(128 + number)


if __name__ == "__main__":
    os.environ["PATH"] = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)

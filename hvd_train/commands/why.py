"""`hvd-train why`: what a job that does not go on waits for, and who keeps it from going on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from hvd_train import remote_url
from hvd_train.console import PROGRAM, show
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags
from hvd_train.help_page import Page, page_of
from hvd_train.progress.clock import duration
from hvd_train.run_files import ranks_file, run_folder

if TYPE_CHECKING:
    from hvd_train.doctor.hang import HostState, Seen
    from hvd_train.doctor.hang_cause import Process, Rank

USAGE = """\
  why [RUN]                who keeps a training from going on, and where
"""
_GB = 1e9


@dataclass(frozen=True)
class WhyOptions:
    """Say why a training that runs does not go on: which rank keeps the others waiting, on which host, at which line.

    All ranks are looked at where they are, over ssh on other hosts. Nothing is stopped or changed.
    """

    run: Annotated[Path | None, tyro.conf.Positional] = None
    """Run folder; default: the newest run."""
    timeout: float = 10.0
    """Seconds after which a host counts as one that does not answer."""
    stacks: bool = False
    """Print the stack of each thread of each rank, and not of the one alone that keeps the others waiting."""
    json: bool = False
    """Print one JSON object, with all stacks."""


def run(arguments: list[str]) -> int:
    """Look at the job, print the answer and return 0. Raises UsageError where no process of it is there."""
    options = parse_flags(WhyOptions, arguments, f"{PROGRAM} why")
    if not 0 < options.timeout < float("inf"):
        raise UsageError(f"--timeout {options.timeout:g}: it must be a number of seconds above 0")
    folder = remote_url.working_folder(options.run or run_folder.newest())
    if not (folder / run_folder.CONFIG).is_file():
        raise UsageError(f"{folder} is not a run of hvd_train: it has no {run_folder.CONFIG}")
    if run_folder.is_foreign(folder):
        raise UsageError(f"{folder} belongs to another user: which processes and hosts it names is not taken on trust")
    try:
        seats = ranks_file.read(folder)
    except ValueError as error:
        raise UsageError(f"{folder / ranks_file.NAME} is no list of ranks ({error})") from None
    if not seats:
        raise UsageError(f"{folder} does not say which processes train in it: its ranks have not met yet")
    if run_folder.has_ended(folder):
        raise UsageError(f"the run in {folder} has ended: type `{PROGRAM} report {folder}`")
    from hvd_train.doctor import hang

    try:
        seen = hang.look(seats, options.timeout)
    except OSError as error:
        raise UsageError(f"ssh cannot be started ({error.strerror}): apt install openssh-client") from None
    if not seen.is_alive:
        hosts = ", ".join(dict.fromkeys(seat.process.host for seat in seats))
        raise UsageError(f"no process of the job that trained last in {folder} is there any more ({hosts})")
    if options.json:
        print(json.dumps(as_dict(seen), indent=1))
    else:
        show("\n".join(lines(seen, all_stacks=options.stacks)))
    return 0


def page(arguments: list[str]) -> Page:
    """Return the help."""
    examples = ("hvd-train why runs/NAME", "hvd-train why runs/NAME --stacks")
    return page_of(WhyOptions, "why [RUN] [FLAGS]", examples, "RUN")


def as_dict(seen: Seen) -> dict[str, Any]:
    """Return all that was seen as plain values for `--json`."""
    return {
        "answer": seen.answer.sentence,
        "kind": seen.answer.kind,
        "culprits": [asdict(culprit) for culprit in seen.answer.culprits],
        "ranks": [{**asdict(rank), "seconds": rank.seconds, "waits_in": rank.waits_in} for rank in seen.ranks],
        "launcher": None if seen.launcher is None else asdict(seen.launcher),
        "hosts": {name: asdict(state) for name, state in seen.hosts.items()},
    }


def lines(seen: Seen, *, all_stacks: bool) -> list[str]:
    """Return the lines of the answer: who it is, then each rank, each host, and the stacks of who it is."""
    culprits = {culprit.rank: culprit.process for culprit in seen.answer.culprits}
    found = [seen.answer.sentence, ""]
    found += [_of_rank(rank) for rank in seen.ranks]
    if seen.launcher is not None:
        one = seen.launcher
        found.append(f"  the launcher on {one.host}: {one.name}, process {one.number}, state {one.state}")
    found += [_of_host(name, state) for name, state in seen.hosts.items()]
    for rank in seen.ranks:
        for process in (rank.process, *rank.children):
            if process is not None and (all_stacks or culprits.get(rank.number) == process.number):
                found += _stacks(rank, process, all_threads=all_stacks)
    return found


def _of_rank(rank: Rank) -> str:
    begin = f"  rank {rank.number} on {rank.host}: "
    process, thread = rank.process, rank.thread
    if process is None:
        return begin + (f"not seen ({rank.silence})" if rank.silence else "its process has ended")
    doing = f"waits in {rank.waits_in}" if rank.waits_in else rank.where.phase if rank.where else "no record"
    if rank.step and not rank.waits_in:
        doing += f" of step {rank.step}"
    frame = (thread.their_frame or next(iter(thread.frames), None)) if thread else None
    at = f", {frame.place} in {frame.function}" if frame else ""
    kernel = f" ({process.call or process.kernel})" if process.call or process.kernel else ""
    cpu = f"state {process.state}{kernel}, {process.cpu:.1f} cores"
    return f"{begin}{doing} for {duration(round(rank.seconds, 1))}{at}; process {process.number}, {cpu}"


def _of_host(name: str, state: HostState) -> str:
    total, free = state.memory
    pressure = ", ".join(f"{what} {percent:.0f} %" for what, percent in state.pressure.items())
    network = state.network
    return (
        f"  {name}: load {state.load:.1f} on {state.cores} cores, {free / _GB:.1f} of {total / _GB:.1f} GB of memory "
        f"free{f', pressure: {pressure}' if pressure else ''}, network: {network['received'] / 1e6:.1f} MB in and "
        f"{network['sent'] / 1e6:.1f} MB out, {network['again']} segments sent again"
    )


def _stacks(rank: Rank, process: Process, *, all_threads: bool) -> list[str]:
    """Return the lines of a process: its first thread, and those in the user's code, or all of them."""
    from hvd_train.doctor.hang_stacks import main_thread

    found = ["", f"rank {rank.number} on {rank.host}, process {process.number} ({process.name}), innermost call first:"]
    if not process.threads:
        found.append("  it does not answer with a stack")
    for thread in process.threads:
        if not all_threads and thread is not main_thread(process.threads) and thread.their_frame is None:
            continue
        found.append(f"  thread {thread.name}")
        found += [f"    {frame.file}:{frame.line} in {frame.function}" for frame in thread.frames]
    return found + process.native.splitlines()

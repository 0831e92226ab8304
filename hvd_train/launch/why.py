"""Say why a job does not go on: which rank the others wait for, and where it is
(`hvd-train why`).
"""

import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hvd_train.errors import first_few

_PACKAGE = f"{Path(__file__).parents[1]}/"
_OF_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("scripts"), "<")
_FRAME = re.compile(r'  File "(.*)", line (\S+) in (.*)')
_MOST = 3  # ranks whose stacks are shown
_NOT_RUNNING, _BUSY, _WAITS = range(3)
# What the kernel says of a process, and what that means here:
_STATES = {
    "stopped": "stopped; type there: kill -CONT {}",
    "tracing-stop": "stopped by a debugger",
    "disk-sleep": "waiting for a disk or a network file system",
}


@dataclass(frozen=True)
class Frame:
    """A line of a Python stack."""

    file: str
    line: str
    function: str

    @property
    def room(self) -> Literal["world", "ours", "library", "user"]:
        """The part of the program: `world` communicates with the other ranks."""
        if self.file.startswith(f"{_PACKAGE}world/") or "/horovod/" in self.file:
            return "world"
        if self.file.startswith(_PACKAGE):
            return "ours"
        is_library = self.file.startswith(_OF_LIBRARIES) or "-packages/" in self.file
        return "library" if is_library else "user"

    def __str__(self) -> str:
        return f"{self.file.removeprefix(f'{os.getcwd()}/')}:{self.line} ({self.function})"


@dataclass(frozen=True)
class Rank:
    """A rank, and what it does in words that follow "is"."""

    number: int
    host: str
    does: str
    kind: int = _NOT_RUNNING
    step: str = ""
    seconds: float = 0.0  # since that began
    moved: str = ""  # to which step, in the last seconds
    processes: Sequence[Mapping[str, Any]] = ()  # its own first


def explain(members: Sequence[tuple[str, int]], found: Mapping[str, Any]) -> list[str]:
    """Return the answer in lines: the culprit, groups of ranks, and stacks of the odd ones.

    `members` are the host and process of each rank; `found` has for each host what `stacks.look`
    finds there, or why that is unknown.
    """
    ranks = [_rank(number, *member, found[member[0]]) for number, member in enumerate(members)]
    if all(rank.moved for rank in ranks):
        return [f"the job trains: {ranks[0].moved}"]
    by_place = defaultdict[Any, list[Rank]](list)
    for rank in ranks:
        by_place[rank.kind, rank.does, rank.step].append(rank)
    groups = sorted(by_place.values(), key=lambda group: (group[0].kind, len(group)))
    lines = [_cause(groups), ""]
    for group in sorted(groups, key=len, reverse=True):
        lines.append(f"{_named(group)}: {group[0].does}{_began(group[0])}")
    odd = [rank for group in groups for rank in group if rank.kind != _WAITS]
    if not odd and len(groups) > 1:
        odd = [group[0] for group in groups]
    for rank in odd[:_MOST]:
        for process in rank.processes:
            if process is rank.processes[0] or _is_busy(process):
                lines += ["", *_stacks(rank, process)]
    for host in dict.fromkeys(rank.host for rank in odd[:_MOST]):
        if not isinstance(found[host], str):
            lines += ["", f"{host}: {found[host]['host']}"]
    return lines


def _rank(number: int, host: str, process: int, of_host: Any) -> Rank:
    if isinstance(of_host, str):
        return Rank(number, host, f"out of reach: {host} gives no answer ({of_host})")
    processes = of_host["ranks"].get(str(process))
    if not processes:
        return Rank(number, host, "gone: its process has ended")
    own, *others = processes
    frames = _threads(own)[0]
    at = _decisive(frames)
    does = _does(own)
    kind = _BUSY if frames else _NOT_RUNNING
    if at and at.room == "world":
        callers = [frame for frame in frames if frame.room in ("user", "ours")]
        does = f"waiting for other ranks in {_place(callers)}"
        kind = _WAITS
    elif at and at.room == "ours" and at.function == "_read":
        busy = next(filter(_is_busy, others), None)
        what = f"process, which is {_does(busy)}" if busy else "processes, which are idle"
        does = f"waiting for its loader {what}"
    moved = f"step {own['before']} -> {own['step']}" if own["before"] != own["step"] else ""
    return Rank(
        number,
        host,
        does,
        kind,
        f"{own['what']} {own['step']}",
        own["seconds"],
        moved,
        processes,
    )


def _threads(process: Mapping[str, Any]) -> list[list[Frame]]:
    """Return the stacks of a process, innermost frames first; the thread that gets
    signals, the main one, comes first.
    """
    texts = process["stacks"].split("\n\n")
    texts.sort(key=lambda text: not text.startswith("Current"))
    return [[Frame(*found) for found in _FRAME.findall(text)] for text in texts]


def _decisive(frames: Sequence[Frame]) -> Frame | None:
    """Return the frame that says what a thread does; those of libraries are everywhere."""
    return next((frame for frame in frames if frame.room != "library"), None)


def _place(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame of the user, or else at all."""
    return next((frame for frame in frames if frame.room == "user"), frames[0])


def _does(process: Mapping[str, Any]) -> str:
    frames = _threads(process)[0]
    state = process["state"]
    if state in _STATES and not (frames and state == "disk-sleep"):
        return _STATES[state].format(process["process"])
    return f"in {_place(frames)}" if frames else f"{state}, and does not say where"


def _is_busy(process: Mapping[str, Any]) -> bool:
    """Return whether a loader process works, or cannot."""
    return process["state"] in _STATES or _decisive(_threads(process)[0]) is not None


def _cause(groups: Sequence[Sequence[Rank]]) -> str:
    first = groups[0][0]
    if first.kind != _WAITS:
        waiting = [rank for group in groups for rank in group if rank.kind == _WAITS]
        verb = "waits" if len(waiting) == 1 else "wait"
        others = f"{_named(waiting)} {verb} for it" if waiting else "no rank waits for another"
        are = "is" if len(groups[0]) == 1 else "are"
        return f"{_named(groups[0])} {are} {first.does}{_began(first)}; {others}"
    if len(groups) == 1:
        return f"all ranks are {first.does}{_began(first)}; the network may be cut"
    places = (f"{_named(group)} {group[0].does} ({group[0].step})" for group in groups[:_MOST])
    return f"all ranks must do the same, but these differ: {'; '.join(places)}"


def _began(rank: Rank) -> str:
    return f"; {rank.step} began {rank.seconds:.0f} s ago" if rank.step else ""


def _named(ranks: Sequence[Rank]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0].number} on {ranks[0].host}"
    return f"ranks {first_few([rank.number for rank in ranks], 8)}"


def _stacks(rank: Rank, process: Mapping[str, Any]) -> Iterator[str]:
    """Yield the main thread and others with code of the user or of ours; the user's is marked."""
    what = "process" if process is rank.processes[0] else "loader process"
    yield f"{_named([rank])}, {what} {process['process']} ({process['state']}):"
    for number, frames in enumerate(_threads(process)):
        if frames and (number == 0 or _decisive(frames)):
            yield "  another thread:" if number else "  main thread:"
            for frame in frames:
                yield f"  {'>' if frame.room == 'user' else ' '} {frame}"

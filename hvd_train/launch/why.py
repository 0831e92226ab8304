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
from hvd_train.launch import stacks

_PACKAGE = f"{Path(__file__).parents[1]}/"
_SCRIPTS = sysconfig.get_path("scripts")
_LIBRARY = re.compile(r"^<|/lib/python3[^/]*/|-packages/")
_TYPED = ("<stdin>", "<string>", "<python-input", "<ipython-input")  # no files, but the user's code
# Python's own files, and libraries that the user's libraries call.
_BELOW = re.compile(r"^<|/(torch|numpy|PIL)/|/lib/python3\.\d+/(?!(site|dist)-packages/)")
_FRAME = re.compile(r'  File "(.*)", line (\S+) in (.*)')
_MOST = 3  # ranks whose stacks are shown
_NOT_RUNNING, _BUSY, _UNKNOWN, _WAITS = range(4)
# What the kernel says of a process, and what that means here:
_STATES = {
    "stopped": "stopped; type there: kill -CONT {}",
    "tracing-stop": "stopped by a debugger",
    "disk-sleep": "waiting for a disk or a network file system",
    "zombie": "dead, which its parent process has not noticed",
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
        at = self.file.removeprefix(_PACKAGE)
        if at.startswith(("world/", "launch/")) or "/horovod/" in self.file:
            return "world"
        if at != self.file:
            return "ours"
        # a program that starts others is in the module of a <string>
        if self.file.startswith(_TYPED) and (self.file, self.function) != ("<string>", "<module>"):
            return "user"
        is_library = self.file.startswith(_SCRIPTS) or _LIBRARY.search(self.file)
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
    return _explained(ranks, found)


def explain_start(numbers: Mapping[int, int], host: str, of_host: Any) -> list[str]:
    """Return the answer about ranks of this host that have not met the others yet.

    `numbers` has the rank of each process.
    """
    ranks = [_rank(number, host, process, of_host) for process, number in numbers.items()]
    lines = _explained(sorted(ranks, key=lambda rank: rank.number), {host: of_host})
    if all(rank.kind == _WAITS for rank in ranks):
        others = "type `hvd-train why` on the hosts of the others"
        lines[0] = f"{_named(ranks)} here: {ranks[0].does}{_began(ranks[0])}; {others}"
    return lines


def _explained(ranks: Sequence[Rank], found: Mapping[str, Any]) -> list[str]:
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
            if _is_shown(process, rank):
                lines += ["", *_stack(rank, process)]
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
    if "step" not in own:
        return Rank(number, host, _does(own))
    frames = _frames(own["stack"])
    at = _decisive(frames)
    does = _does(own)
    kind = _BUSY if frames else _NOT_RUNNING
    busy = next((each for each in others if "name" not in each and _is_busy(each)), None)
    if at and at.room == "world":
        callers = [frame for frame in frames if frame.room in ("user", "ours")]
        does = f"waiting for other ranks in {_place(callers)}"
        kind = _WAITS
    elif at and at.room == "ours" and at.function == "_read":
        what = f"process, which is {_does(busy)}" if busy else "processes, which are idle"
        does = f"waiting for its loader {what}"
    elif not frames and not own.get("answers", True) and own["state"] not in _STATES:
        kind = _UNKNOWN
        if own["waited"]:
            kind = _WAITS
            does = "waiting for other ranks"
        elif busy:
            kind = _BUSY
            does += f"; its loader process is {_does(busy)}"
    if kind != _WAITS:
        for each in others:
            if "name" in each and each["state"] in _STATES:
                does += f"; its process {each['process']} ({each['name']}) is {_does(each)}"
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


def _frames(stack: str) -> list[Frame]:
    """Return the frames of a stack, the innermost first."""
    return [Frame(*found) for found in _FRAME.findall(stack)]


def _decisive(frames: Sequence[Frame]) -> Frame | None:
    """Return the frame that says what a process does; frames of libraries are everywhere."""
    return next((frame for frame in frames if frame.room != "library"), None)


def _place(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame of the user, or else of a library that a user chooses."""
    return next(
        (frame for frame in frames if frame.room == "user"),
        next((frame for frame in frames if not _BELOW.search(frame.file)), frames[0]),
    )


def _does(process: Mapping[str, Any]) -> str:
    frames = _frames(process["stack"])
    state = process["state"]
    if state in _STATES and not (frames and state == "disk-sleep"):
        return _STATES[state].format(process["process"])
    if frames:
        return f"in {_place(frames)}"
    why = "" if process.get("answers", True) else ", since its program handles SIGUSR2"
    return f"{state} at an unknown place{why}"


def _is_busy(process: Mapping[str, Any]) -> bool:
    """Return whether a loader process works, or cannot."""
    return process["state"] in _STATES or _decisive(_frames(process["stack"])) is not None


def _is_shown(process: Mapping[str, Any], rank: Rank) -> bool:
    """Return whether the answer has the stacks of this process of an odd rank."""
    if "name" in process:
        waits = any("/subprocess.py" in each["stack"] for each in rank.processes)
        return waits or process["state"] in _STATES
    return process is rank.processes[0] or _is_busy(process)


def _cause(groups: Sequence[Sequence[Rank]]) -> str:
    first = groups[0][0]
    if first.kind != _WAITS:
        known = [group for group in groups if group[0].kind < _UNKNOWN]
        odd = known[:_MOST] or groups[:1]
        waiting = [rank for group in groups for rank in group if rank.kind == _WAITS]
        verb = "waits" if len(waiting) == 1 else "wait"
        it = "it" if sum(map(len, odd)) == 1 else "them"
        others = f"{_named(waiting)} {verb} for {it}" if waiting else "no rank waits for another"
        return "; ".join([*map(_odd, odd), others])
    ranks = [rank for group in groups for rank in group]
    silent = [
        f"{_named([rank])} gets no answer from {', '.join(addresses)}"
        for rank in ranks
        if (addresses := rank.processes[0].get("unconfirmed"))
    ]
    if silent:
        return f"all ranks are waiting for other ranks{_began(first)}; {'; '.join(silent[:_MOST])}"
    if len(groups) == 1:
        return f"all ranks are {first.does}{_began(first)}; the network may be cut"
    if len({rank.does for rank in ranks}) == 1:  # the others have done what these wait for
        behind = min(groups, key=lambda group: int(group[0].step.rpartition(" ")[2]))
        why = "the network may be cut, or a thread in C code keeps Python's lock there"
        return f"{_odd(behind)}; the others are further; {why}"
    places = (f"{_named(group)} {group[0].does} ({group[0].step})" for group in groups[:_MOST])
    return f"all ranks must do the same, but these differ: {'; '.join(places)}"


def _odd(group: Sequence[Rank]) -> str:
    """Return what ranks do that others wait for."""
    are = "is" if len(group) == 1 else "are"
    return f"{_named(group)} {are} {group[0].does}{_began(group[0])}"


def _began(rank: Rank) -> str:
    if rank.step.startswith(stacks.STARTS):
        return f"; it started {rank.seconds:.0f} s ago and has not begun to train"
    return f"; {rank.step} began {rank.seconds:.0f} s ago" if rank.step else ""


def _named(ranks: Sequence[Rank]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0].number} on {ranks[0].host}"
    return f"ranks {first_few([rank.number for rank in ranks], 8)}"


def _stack(rank: Rank, process: Mapping[str, Any]) -> Iterator[str]:
    """Yield the stack of a process and of its threads with code of the user, which is marked."""
    usual = "process" if process is rank.processes[0] else "loader process"
    what = f"{process.get('name', usual)} {process['process']} ({process['state']})"
    yield f"{_named([rank])}, {what}{':' if process['stack'] else ''}"
    threads = map(_frames, process["threads"])
    of_user = [frames for frames in threads if any(frame.room == "user" for frame in frames)]
    for number, frames in enumerate([_frames(process["stack"]), *of_user]):
        if number:
            yield "  another thread:"
        for frame in frames:
            yield f"  {'>' if frame.room == 'user' else ' '} {frame}"

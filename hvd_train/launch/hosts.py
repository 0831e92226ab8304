"""Host files: read, checked, and written as each launcher takes them. No torch."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvd_train.errors import UsageError

Form = Literal["horovod", "openmpi", "mpich", "slurm"]

_NAME = r"[A-Za-z0-9_.-]+"
_LINE = re.compile(rf"({_NAME})(?::(\d+))?(?:\s+slots\s*=\s*(\d+))?(?:\s+max[-_]slots\s*=\s*\d+)?", re.ASCII)
_RANGES = re.compile(r"([A-Za-z0-9_.-]*)\[([0-9,-]+)\]([A-Za-z0-9_.-]*)")


@dataclass(frozen=True)
class Host:
    """A host and how many ranks it takes."""

    name: str
    slots: int


def read(path: Path, form: Form = "horovod") -> tuple[Host, ...]:
    """The hosts of a file in the order of their lines.

    A line is `NAME`, `NAME:SLOTS` or `NAME slots=SLOTS` (`max_slots=` is ignored); in Slurm's form it is a name for
    each task (SLURM_HOSTFILE). Blank lines and what follows a # do not count. Raises UsageError that lists every line
    that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"cannot read the host file {path}: {reason}") from None
    lines = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    return _checked(((f"{path}, line {number}", line) for number, line in lines if line), form, f"{path}")


def parse(line: str) -> tuple[Host, ...]:
    """The hosts of `-H h1:2,h2:2`, where Slurm's `node[1-3]:2` is three of them. Raises UsageError."""
    parts = [part for entry in re.split(r",(?![^\[]*\])", line) for part in _expanded(entry.strip())]
    return _checked(((f"-H {line}", part) for part in parts if part), "horovod", f"-H {line}")


def written(hosts: Sequence[Host], form: Form) -> str:
    """The text of a host file for a launcher."""
    if form == "slurm":
        return "".join(f"{host.name}\n" * host.slots for host in hosts)
    pattern = "{0.name}:{0.slots}\n" if form == "mpich" else "{0.name} slots={0.slots}\n"
    return "".join(pattern.format(host) for host in hosts)


def unknown(hosts: Iterable[Host]) -> list[str]:
    """The names that do not resolve here, all asked for at once."""
    names = [host.name for host in hosts]
    with ThreadPoolExecutor(max_workers=32) as asking:
        return [name for name, found in zip(names, asking.map(_resolves, names), strict=True) if not found]


def describe(hosts: Sequence[Host]) -> str:
    """How many hosts and slots, in one line."""
    slots = sum(host.slots for host in hosts)
    listed = ", ".join(f"{host.name} ({host.slots})" for host in hosts)
    return f"{len(hosts)} host{'s' * (len(hosts) != 1)}, {slots} slot{'s' * (slots != 1)}: {listed}"


def _checked(lines: Iterable[tuple[str, str]], form: Form, source: str) -> tuple[Host, ...]:
    found: list[Host] = []
    wrong = []
    for place, line in lines:
        match = _LINE.fullmatch(line)
        if match is None or (form == "slurm" and line != match[1]):
            wanted = "a name" if form == "slurm" else "of the form 'NAME slots=N'"
            wrong.append(f"{place}: {line!r} is not {wanted}")
            continue
        slots = int(match[3] or match[2] or 1)
        if slots < 1:
            wrong.append(f"{place}: {match[1]} has no slots")
        found.append(Host(match[1], slots))
    counts = Counter(host.name for host in found)
    if form == "slurm":
        found = [Host(name, count) for name, count in counts.items()]
    else:
        twice = [(name, count) for name, count in counts.items() if count > 1]
        wrong += [f"{source}: {name} is there {count} times; add its slots up" for name, count in twice]
    if not found and not wrong:
        wrong.append(f"{source} names no host: one on each line, 'NAME slots=N'")
    if wrong:
        raise UsageError("\n".join(wrong))
    return tuple(found)


def _expanded(entry: str) -> list[str]:
    """`node[01-03]:2` as three entries."""
    match = _RANGES.search(entry)
    if match is None:
        return [entry]
    start, ranges, end = entry[: match.start(2) - 1], match[2], entry[match.end(2) + 1 :]
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first):
            raise UsageError(f"{entry!r}: {part!r} is not a range of numbers")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return [whole for number in numbers for whole in _expanded(f"{start}{number}{end}")]


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True

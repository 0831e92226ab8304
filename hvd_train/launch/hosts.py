"""Read and check host files and lists of hosts. No torch."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hvd_train.errors import UsageError, whole_number
from hvd_train.launch.child import output_of, why_failed

NAME = r"(?!-)[A-Za-z0-9_.-]+"  # ssh would take a name that begins with - as an option
_LINE = re.compile(
    rf"({NAME})(?::(\d+))?(?:\s+slots\s*=\s*(\d+))?(?:\s+max[-_]slots\s*=\s*\d+)?", re.ASCII
)
_RANGES = re.compile(r"(.*?)\[([0-9,-]+)\](.*)")
_COMMAND_S = 30.0


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks that it takes."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def named(text: str | None) -> tuple[Host, ...]:
    """Return the hosts of a file, or of a list such as `h1:2,h2:2`; none for no text.

    Raises UsageError as `parse`.
    """
    if text is None:
        return ()
    path = Path(text)
    if not path.exists() and re.search(r"[:,\[]", text):
        return parse(text)
    try:
        return _some(lines_of(path.read_text(encoding="utf-8"), text), text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"cannot read the host file {path}: {reason}") from None


def parse(line: str) -> tuple[Host, ...]:
    """Return the hosts of a list such as `h1:2,node[1-3]:2`.

    Raises UsageError for a wrong entry or no host.
    """
    entries = re.split(r",(?![^\[]*\])", line)
    return _some(
        lines_of("\n".join(part for entry in entries for part in _expanded(entry)), line), line
    )


def lines_of(text: str, source: str) -> tuple[Host, ...]:
    """Return the hosts of the lines of a host file, perhaps none; one
    without a number has one slot.

    A line is `NAME`, `NAME:SLOTS` or `NAME slots=SLOTS` (`max_slots=` is ignored). Blank lines and
    text after a # are skipped. Raises UsageError, which names `source` and the first wrong line.
    """
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (entry := line.partition("#")[0].strip()):
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise UsageError(
                f"{source}, line {number}: {entry!r} is not of the form 'NAME slots=N'"
            )
        if match[1] in found:
            raise UsageError(f"{source}: {match[1]} is there twice; add its slots up")
        found[match[1]] = Host(match[1], int(match[3] or match[2] or 1))
    return tuple(found.values())


def printed_by(command: str, source: str) -> tuple[Host, ...]:
    """Return the hosts of the lines that a shell command prints now, perhaps none.

    Raises UsageError for a failure, more than 30 seconds, or as `lines_of`.
    """
    try:
        done = output_of(["sh", "-c", command], timeout=_COMMAND_S)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{command} has not ended within {_COMMAND_S:.0f} s") from None
    if done.returncode:
        raise UsageError(f"{command}: {why_failed(done)}")
    return lines_of(done.stdout, source)


def _some(found: tuple[Host, ...], source: str) -> tuple[Host, ...]:
    if not all(host.slots for host in found) or not found:
        raise UsageError(f"{source}: name hosts, one on each line, 'NAME slots=N' with N from 1 on")
    return found


def _expanded(entry: str) -> list[str]:
    """Expand an entry with ranges: three entries for `node[01-03]:2`.

    Raises UsageError for a wrong range.
    """
    match = _RANGES.fullmatch(entry)
    if match is None:
        return [entry]
    start, ranges, end = match.groups()
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        lowest = whole_number(first)
        highest = whole_number(last or first)
        if lowest is None or highest is None or highest < lowest:
            raise UsageError(f"{entry!r}: {part!r} is not a range of numbers")
        numbers += [f"{number:0{len(first)}}" for number in range(lowest, highest + 1)]
    return [whole for number in numbers for whole in _expanded(f"{start}{number}{end}")]

"""Read and check host files and lists of hosts. No torch."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hvd_train.errors import UsageError, first_few, whole_number

NAME = r"(?!-)[A-Za-z0-9_.-]+"  # ssh would take a name that begins with - as an option
_LINE = re.compile(rf"({NAME})(?::(\d+))?(?:\s+slots\s*=\s*(\d+))?(?:\s+max[-_]slots\s*=\s*\d+)?", re.ASCII)
_RANGES = re.compile(r"([A-Za-z0-9_.-]*)\[([0-9,-]+)\]([A-Za-z0-9_.-]*)")


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks that it takes."""

    name: str
    slots: int


def read(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file in the order of their lines.

    A line is `NAME`, `NAME:SLOTS` or `NAME slots=SLOTS` (`max_slots=` is ignored). Blank lines and text after a # are
    skipped. Raises UsageError, which lists every wrong line, or if the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"cannot read the host file {path}: {reason}") from None
    return _some(lines_of(text, f"{path}"), f"{path}")


def parse(line: str) -> tuple[Host, ...]:
    """Return the hosts of a list such as `h1:2,node[1-3]:2`. Raises UsageError, which lists every wrong entry."""
    parts = [part for entry in re.split(r",(?![^\[]*\])", line) for part in _expanded(entry.strip())]
    return _some(_checked(((f"-H {line}", part) for part in parts if part), f"-H {line}"), f"-H {line}")


def named(text: str) -> tuple[Host, ...]:
    """Return the hosts of a file, or of a list such as `h1:2,h2:2`. Raises UsageError as `read` and `parse`."""
    is_list = not Path(text).exists() and re.search(r"[:,\[]", text)
    return parse(text) if is_list else read(Path(text))


def lines_of(text: str, source: str, slots: int = 1) -> tuple[Host, ...]:
    """Return the hosts of the lines of a host file, perhaps none; one without a number has `slots`.

    Raises UsageError, which names `source` and lists every wrong line.
    """
    lines = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    return _checked(((f"{source}, line {number}", line) for number, line in lines if line), source, slots)


def _some(found: tuple[Host, ...], source: str) -> tuple[Host, ...]:
    if not found:
        raise UsageError(f"{source} names no host: one on each line, 'NAME slots=N'")
    if empty := [host.name for host in found if host.slots < 1]:
        raise UsageError(f"{source}: {', '.join(empty)} has no slots")
    return found


def _checked(lines: Iterable[tuple[str, str]], source: str, slots: int = 1) -> tuple[Host, ...]:
    found: list[Host] = []
    wrong = []
    for place, line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            wrong.append(f"{place}: {line!r} is not of the form 'NAME slots=N'")
            continue
        found.append(Host(match[1], int(match[3] or match[2] or slots)))
    counts = Counter(host.name for host in found)
    wrong += [f"{source}: {name} is there twice; add its slots up" for name, count in counts.items() if count > 1]
    if wrong:
        raise UsageError(first_few(wrong))
    return tuple(found)


def _expanded(entry: str) -> list[str]:
    """Expand an entry with ranges: three entries for `node[01-03]:2`. Raises UsageError for a wrong range."""
    match = _RANGES.search(entry)
    if match is None:
        return [entry]
    start, ranges, end = entry[: match.start(2) - 1], match[2], entry[match.end(2) + 1 :]
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        lowest, highest = whole_number(first), whole_number(last or first)
        if lowest is None or highest is None or highest < lowest:
            raise UsageError(f"{entry!r}: {part!r} is not a range of numbers")
        numbers += [f"{number:0{len(first)}}" for number in range(lowest, highest + 1)]
    return [whole for number in numbers for whole in _expanded(f"{start}{number}{end}")]

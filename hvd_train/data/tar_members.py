"""The files in a tar, by their headers alone: where the bytes of each are. Nothing is extracted.

Shards may come from anybody. tarfile of the standard library follows links, guesses, and goes on after damage, and some
of its releases do not come to an end with headers that are made for it; what cannot be read safely is refused here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 512
_AHEAD = 8 * BLOCK  # read at once: a small file, its header and the header of the next one
_MOST_EXTENDED = 1 << 16  # bytes of a long name or of a pax header
_MOST_PADDING = 1 << 20  # bytes after the end of the archive, which fill up a record
_REGULAR, _FOLDER, _LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"0\07", b"5", b"L", b"K", b"x", b"g"
_REFUSED = {
    b"1": "a hard link",
    b"2": "a link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
}
_PAX_RECORD = re.compile(rb"([1-9][0-9]{0,5}) ([^=\n]+)=")
_CONTROL = re.compile("[\x00-\x1f\x7f]")


class Member(NamedTuple):
    """A file in a tar: its name, and where in the tar its bytes are."""

    name: str
    offset: int
    length: int


def members(descriptor: int, size: int) -> Iterator[Member]:
    """Yield the files in a tar of `size` bytes, in their order.

    Raises ValueError where the tar is damaged or cut off, where something in it is neither a file nor a folder, and
    where a name leads out of the folder in which it would be unpacked.
    """
    window, at = _Window(descriptor), 0
    long_name: bytes | None = None
    extended: dict[bytes, bytes] = {}
    while True:
        header = window.read(at, BLOCK)
        if len(header) < BLOCK:
            raise ValueError("it is cut off: it has no end of an archive")
        if not header.strip(b"\0"):
            _check_end(window, at, size)
            return
        _check_sum(header, at)
        kind = header[156:157]
        length = _number(header[124:136], at)
        if kind in (_PAX, _LONG_NAME, _LONG_LINK, _PAX_GLOBAL):
            if length > _MOST_EXTENDED:
                raise ValueError(f"the header at byte {at:,} has {length:,} bytes more, and no header has that many")
            content = window.read(at + BLOCK, length)
            if len(content) < length:
                raise ValueError("it is cut off in a header")
            if kind == _LONG_NAME:
                long_name = content.rstrip(b"\0")
            elif kind == _PAX:
                extended = _pax(content, at)
            elif kind == _PAX_GLOBAL and not {b"path", b"size"}.isdisjoint(_pax(content, at)):
                raise ValueError(f"the header at byte {at:,} gives all files one name or size")
        else:
            name = _name(extended.get(b"path") or long_name or _short_name(header), at)
            if kind in _REFUSED or any(key.startswith(b"GNU.sparse") for key in extended):
                raise ValueError(f"{name} is {_REFUSED.get(kind, 'a sparse file')}, and not a file of its own")
            if kind not in _FOLDER + _REGULAR:
                raise ValueError(f"{name} is of the unknown kind {kind!r}")
            if b"size" in extended:
                length = _decimal(extended[b"size"], at)
            if at + BLOCK + length > size:
                raise ValueError(f"it is cut off in {name}")
            if kind != _FOLDER:
                yield Member(name, at + BLOCK, length)
            long_name, extended = None, {}
        at += BLOCK + -(-length // BLOCK) * BLOCK


class _Window:
    """Reads a file in pieces that are larger than a header."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._start, self._content = descriptor, 0, b""

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes, or fewer where the file ends."""
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._content):
            self._start, begin = offset, 0
            self._content = os.pread(self._descriptor, max(length, _AHEAD), offset)
        return self._content[begin : begin + length]


def _check_end(window: _Window, at: int, size: int) -> None:
    """Raise ValueError where anything but padding follows the end of the archive, as in tars that cat has joined."""
    rest = size - at
    if rest > _MOST_PADDING or window.read(at, rest).strip(b"\0"):
        raise ValueError(f"it goes on after the end of the archive at byte {at:,}: was it joined from several?")


def _check_sum(header: bytes, at: int) -> None:
    blank = header[:148] + b" " * 8 + header[156:]
    excess = sum(blank) - _number(header[148:156], at)
    if excess and excess != 256 * sum(byte > 127 for byte in blank):  # old tars have added signed bytes
        raise ValueError(f"it is damaged, or no tar: there is no header at byte {at:,}")


def _number(field: bytes, at: int) -> int:
    """Return a number as headers have it: octal digits or, for large ones, bytes after a first one of 128."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b"\0 ")
    if not re.fullmatch(rb"[0-7]*", digits):
        raise ValueError(f"it is damaged, or no tar: there is no header at byte {at:,}")
    return int(digits or b"0", 8)


def _decimal(digits: bytes, at: int) -> int:
    if not re.fullmatch(rb"[0-9]{1,18}", digits):
        raise ValueError(f"the header at byte {at:,} has a size that is no number")
    return int(digits)


def _pax(content: bytes, at: int) -> dict[bytes, bytes]:
    """Return the records of a pax header, `LENGTH KEY=VALUE` and a line end each."""
    found, begin = {}, 0
    while begin < len(content):
        record = _PAX_RECORD.match(content, begin)
        end = begin + int(record[1]) if record else 0
        if record is None or not record.end() < end <= len(content) or content[end - 1 : end] != b"\n":
            raise ValueError(f"the pax header at byte {at:,} is damaged")
        found[record[2]] = content[record.end() : end - 1]
        begin = end
    return found


def _short_name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""  # GNU has times there
    return prefix + b"/" + name if prefix else name


def _name(raw: bytes, at: int) -> str:
    """Return the name of a file without `./` before it. Raises ValueError for one that no data set has."""
    name = os.fsdecode(raw)
    while name.startswith("./"):
        name = name[2:]
    if _CONTROL.search(name):
        raise ValueError(f"the file at byte {at:,} has control characters in its name")
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"the name {name} leads out of the archive")
    return name

"""Files in tars: those that tarfile finds, and one line for a tar that is damaged or made to do harm."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hvd_train.data.tar_members import members

FILES = {"a.jpg": b"x" * 700, "./b.cls": b"7", "folder/c.json": b"", "d" * 130 + ".png": b"y" * 5000, "é.txt": b"z"}


def made(path: Path, kind: int = tarfile.GNU_FORMAT, headers: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w", format=kind, pax_headers=headers) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in FILES.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 1.5  # a pax header has the fraction
            tar.addfile(member, io.BytesIO(content))
    return path


def found(path: Path) -> list[tuple[str, bytes]]:
    with path.open("rb") as file:
        listed = [*members(file.fileno(), path.stat().st_size)]
        return [(name, os.pread(file.fileno(), length, offset)) for name, offset, length in listed]


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_files_are_found_where_they_are(kind: int) -> None:
    """Names, long ones among them, and contents are those that were written; folders are passed over."""
    names = [name.removeprefix("./") for name in FILES]
    assert found(made(Path("a.tar"), kind)) == [*zip(names, FILES.values(), strict=True)]


def test_names_of_two_parts_are_joined() -> None:
    """As USTAR has them that are longer than 100 bytes."""
    name = "f" * 80 + "/" + "g" * 80 + ".jpg"
    with tarfile.open("a.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo(name))
    assert found(Path("a.tar")) == [(name, b"")]


def member(name: str, content: bytes = b"", **changes: Any) -> bytes:
    """Return a header with this content, and no end."""
    one = tarfile.TarInfo(name)
    one.size = len(content)
    for attribute, value in changes.items():
        setattr(one, attribute, value)
    return one.tobuf(tarfile.GNU_FORMAT) + content + b"\0" * (-len(content) % 512)


def pax(records: bytes) -> bytes:
    return member("pax", records, type=tarfile.XHDTYPE)


def signed(header: bytes) -> bytes:
    """Return a header with the sum that it should have."""
    blank = header[:148] + b" " * 8 + header[156:]
    return header[:148] + b"%06o\0 " % sum(blank) + header[156:]


END = b"\0" * 1024
GOOD = member("a.jpg", b"x")
HOSTILE = {
    "nothing": (b"", "cut off: it has no end"),
    "no tar": (b"GIF89a" * 200, "damaged, or no tar: there is no header at byte 0"),
    "no end": (GOOD, "cut off: it has no end"),
    "half a header": (GOOD + GOOD[:100], "cut off: it has no end"),
    "half a file": (member("a.jpg", b"x" * 2000)[:1000], "cut off in a.jpg"),
    "joined tars": (GOOD + END + GOOD + END, "goes on after the end of the archive at byte 1,024"),
    "endless padding": (GOOD + b"\0" * (2 << 20), "goes on after the end"),
    "a changed byte": (b"b" + GOOD[1:] + END, "damaged, or no tar: there is no header at byte 0"),
    "an absolute name": (member("/etc/passwd.jpg") + END, "the name /etc/passwd.jpg leads out of the archive"),
    "a name that climbs": (member("a/../../b.jpg") + END, "leads out of the archive"),
    "a line end in a name": (member("a\nb.jpg") + END, "control characters in its name"),
    "a link": (member("a.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd") + END, "a.jpg is a link, and not"),
    "a hard link": (member("a.jpg", type=tarfile.LNKTYPE, linkname="b.jpg") + END, "a.jpg is a hard link, and not"),
    "a device": (member("a.jpg", type=tarfile.CHRTYPE) + END, "a.jpg is a device"),
    "a pipe": (member("a.jpg", type=tarfile.FIFOTYPE) + END, "a.jpg is a pipe"),
    "a sparse file": (member("a.jpg", type=tarfile.GNUTYPE_SPARSE) + END, "a.jpg is a sparse file"),
    "a sparse file by pax": (pax(b"22 GNU.sparse.major=1\n") + GOOD + END, "a.jpg is a sparse file"),
    "an unknown kind": (member("a.jpg", type=b"V") + END, "unknown kind"),
    "a huge size": (signed(GOOD[:124] + b"\x80" + b"\xff" * 11 + GOOD[136:512]) + END, "cut off in a.jpg"),
    "a negative size": (signed(GOOD[:124] + b"\xff" * 12 + GOOD[136:512]) + END, "no header at byte 0"),
    "a huge size by pax": (pax(b"27 size=999999999999999999\n") + GOOD + END, "cut off in a.jpg"),
    "a size that is none": (pax(b"11 size=-1\n") + GOOD + END, "a size that is no number"),
    "a pax header of wrong length": (pax(b"99 path=b\n") + GOOD + END, "the pax header at byte 0 is damaged"),
    "a pax header that goes back": (pax(b"0 path=b\n") + GOOD + END, "the pax header at byte 0 is damaged"),
    "a name for all": (member("g", b"10 path=b\n", type=tarfile.XGLTYPE) + GOOD + END, "all files one name"),
    "a long long name": (
        member("L", b"x" * 70_000, type=tarfile.GNUTYPE_LONGNAME) + GOOD + END,
        "no header has that many",
    ),
    "a long name that ends": (member("L", b"x" * 2000, type=tarfile.GNUTYPE_LONGNAME)[:600], "cut off in a header"),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_what_cannot_be_read_safely_is_refused(fault: str) -> None:
    """The error says in one line what is wrong, and where."""
    content, message = HOSTILE[fault]
    Path("a.tar").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        found(Path("a.tar"))
    assert "\n" not in str(caught.value)


def test_a_header_of_pax_that_says_nothing_of_a_file_is_passed_over() -> None:
    """Such as the comment that git archive writes."""
    made(Path("a.tar"), tarfile.PAX_FORMAT, {"comment": "of all"})
    assert len(found(Path("a.tar"))) == len(FILES)


def test_sums_of_old_tars_are_understood() -> None:
    """Some have added the bytes of a header as signed numbers."""
    blank = member("é.jpg")[:512]
    blank = blank[:148] + b" " * 8 + blank[156:]
    total = sum(byte - 256 * (byte > 127) for byte in blank)
    assert total != sum(blank)
    Path("a.tar").write_bytes(blank[:148] + b"%06o\0 " % total + blank[156:] + END)
    assert found(Path("a.tar")) == [("é.jpg", b"")]

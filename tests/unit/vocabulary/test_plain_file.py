"""Files that somebody else may have planted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvd_train import plain_file

pytestmark = pytest.mark.timeout(120)  # what is planted here would hang a reader for ever


def test_a_file_that_is_written_in_place_has_one_name() -> None:
    """Links of both kinds and pipes are refused at once; a plain file is opened with all that it holds."""
    for name in ("outside", "other"):
        Path(name).write_text("precious")
    Path("soft").symlink_to("outside")
    Path("hard").hardlink_to("other")
    os.mkfifo("pipe")
    for name in ("soft", "hard", "pipe"):
        with pytest.raises(OSError, match=r"it is a symlink|not a file of its own|No such device"):
            plain_file.in_place(name, os.O_WRONLY | os.O_APPEND)
    with open("plain", "ab", opener=plain_file.in_place) as file:
        file.write(b"one")
    with open("plain", "r+b", opener=plain_file.in_place) as file:
        assert file.read() == b"one"
    assert {Path(name).read_text() for name in ("outside", "other")} == {"precious"}


@pytest.fixture
def planted() -> None:
    """Make a pipe that nobody writes into, links to it and to a device without an end, and a hole of a terabyte."""
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    Path("endless").symlink_to("/dev/zero")
    Path("hole").touch()
    os.truncate("hole", 2**40)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pipe", "it is no file, but a pipe or a device"),
        ("link", "it is no file, but a pipe or a device"),
        ("endless", "it is no file, but a pipe or a device"),
        ("hole", "it is larger than 1,073,741,824 bytes"),
        (".", "Is a directory"),
        ("nothing", "No such file or directory"),
    ],
)
@pytest.mark.usefixtures("planted")
def test_what_cannot_be_read_whole_is_an_error_at_once(name: str, reason: str) -> None:
    """It has the name of the file and the reason, and neither waits nor takes memory."""
    with pytest.raises(OSError, match=reason) as caught:
        plain_file.read_bytes(name)
    assert (caught.value.filename, caught.value.strerror) == (name, reason)


def test_a_file_is_read_by_any_name() -> None:
    Path("file").write_text("grün", encoding="utf-8")
    Path("link").symlink_to("file")
    assert plain_file.read_text("link") == "grün"
    with pytest.raises(OSError, match="it is larger than 4 bytes"):
        plain_file.read_text("link", most_bytes=4)
    Path("endless").symlink_to("/proc/self/pagemap")  # a plain file of no size that continues for gigabytes
    assert plain_file.read_bytes("endless") == b""


def test_a_line_without_end_is_none() -> None:
    """A hole has no line end for a terabyte, and a reader of lines would hold all of it."""
    Path("file").write_bytes(b"one\ntwo\n")
    with plain_file.opened("file") as file:
        assert list(plain_file.lines(file)) == [b"one\n", b"two\n"]
    os.truncate("file", 2**40)
    with plain_file.opened("file") as file:
        lines = plain_file.lines(file)
        assert [next(lines), next(lines)] == [b"one\n", b"two\n"]
        with pytest.raises(OSError, match="a line of it is longer than 16,777,216 bytes"):
            next(lines)

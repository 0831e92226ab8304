"""Files that another user may have planted."""

import os
from pathlib import Path

import pytest

from hvd_train import plain_file

pytestmark = pytest.mark.timeout(120)  # a reader of these files could hang


def test_links_and_pipes_are_not_written_in_place() -> None:
    Path("outside").write_text("precious")
    Path("other").write_text("precious")
    Path("soft").symlink_to("outside")
    Path("hard").hardlink_to("other")
    os.mkfifo("pipe")
    for name in ("soft", "hard", "pipe"):
        with pytest.raises(OSError, match=r"symbolic link|not a file of its own|No such device"):
            plain_file.in_place(name, os.O_WRONLY | os.O_APPEND)
    with open("plain", "ab", opener=plain_file.in_place) as file:
        file.write(b"one")
    with open("plain", "r+b", opener=plain_file.in_place) as file:
        assert file.read() == b"one"


def test_a_file_that_cannot_be_read_whole_is_an_error() -> None:
    """The error comes at once and takes no memory."""
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    Path("endless").symlink_to("/dev/zero")
    Path("hole").touch()
    os.truncate("hole", 2**40)
    no_file = "it is no file, but a pipe or a device"
    for name, reason in {
        "pipe": no_file,
        "link": no_file,
        "endless": no_file,
        "hole": "it is larger than 1,073,741,824 bytes",
        ".": "Is a directory",
        "nothing": "No such file or directory",
    }.items():
        with pytest.raises(OSError, match=reason) as caught:
            plain_file.read_bytes(name)
        assert (caught.value.filename, caught.value.strerror) == (name, reason)


def test_a_file_is_read_through_a_symlink() -> None:
    Path("file").write_text("grün", encoding="utf-8")
    Path("link").symlink_to("file")
    assert plain_file.read_text("link") == "grün"
    with pytest.raises(OSError, match="it is larger than 4 bytes"):
        plain_file.read_text("link", most_bytes=4)
    Path("endless").symlink_to("/proc/self/pagemap")  # a regular file of size 0 with gigabytes
    assert plain_file.read_bytes("endless") == b""

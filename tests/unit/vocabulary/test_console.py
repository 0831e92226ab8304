"""Lines about the program itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.console import printable, say

ROOT = Path(__file__).parents[3]
PRINTS = f"""
import logging, os, subprocess, sys, warnings
sys.path.insert(0, {str(ROOT)!r})
from hvd_train.console import outlive, say
outlive()
outlive()
for count in range(3):
    print("a line", count)
    print("a line", count, flush=True)
    say("of the program")
    warnings.warn(f"{{count}}")
    logging.warning("of a library")
    print("a traceback", file=sys.stderr, flush=True)
sys.stdout.flush()
"""


def test_a_line_bears_the_programs_name_and_leaves_results_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """What a command prints can be piped on; what the program says about itself goes to standard error."""
    say("no such run folder")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "hvd-train: no such run folder\n")


@pytest.mark.parametrize("gone", ["stdout", "both"])
def test_a_console_that_is_gone_ends_nothing(gone: str) -> None:
    """What is printed into a pipe that nobody reads vanishes, and what comes later too, of native code and children."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {name: writer for name in ("stdout", "stderr") if gone in (name, "both")}
    later = "os.write({0}, b'native')\nsubprocess.run(['sh', '-c', 'echo child >&{0}'], check=True)\n"
    code = PRINTS + "".join(later.format(1 if name == "stdout" else 2) for name in streams)
    kept = {name: subprocess.PIPE for name in ("stdout", "stderr") if name not in streams}
    done = subprocess.run([sys.executable, "-c", code], **streams, **kept, timeout=250, check=False)  # type: ignore[call-overload]
    os.close(writer)
    assert done.returncode == 0, done.stderr
    if gone == "stdout":
        assert done.stderr.count(b"hvd-train: of the program") == 3
        assert b"Error" not in done.stderr


@pytest.mark.parametrize("prepare", ["rank_log.whole_lines()", "console.outlive()"])
def test_a_name_that_the_console_cannot_show_is_escaped(prepare: str) -> None:
    """As in a container without a locale, and for names of files that are not in UTF-8."""
    code = f"import sys; from hvd_train import console; from hvd_train.launch import rank_log; {prepare}; "
    code += r"console.show('gr\u00fcn \u732b \udcff'); console.say('gr\u00fcn'); print('\u732b')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "hvd-train: gr\\xfcn\n")
    assert done.stdout == "gr\\xfcn \\u732b \\udcff\n\\u732b\n"


def test_a_full_disk_takes_lines_and_nothing_else() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", PRINTS], stdout=full, stderr=full, timeout=250, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_not_given_to_a_file(closed: str) -> None:
    """Without care, the next file that is opened would get the lines of native code: a checkpoint, say."""
    code = PRINTS + "file = open('file', 'wb')\nos.write(1, b'native')\nos.write(2, b'native')\n"
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path("file").read_bytes() == b""


HOSTILE = "a\x1b]0;title\x07\x1b[2J\x7f\x9b31m\u202egnp\u2066\r\nb\tc"


def test_nothing_that_a_terminal_obeys_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Escapes, C1 controls and signs that turn the direction are replaced; letters of any language stay."""
    assert printable(HOSTILE) == "a\ufffd]0;title\ufffd\ufffd[2J\ufffd\ufffd31m\ufffdgnp\ufffd\ufffd\ufffdb\ufffdc"
    assert printable(HOSTILE, keep="\n\t").endswith("\ufffd\nb\tc")
    assert printable("grün 猫 שלום") == "grün 猫 שלום"
    say(HOSTILE)
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(capsys.readouterr().err)

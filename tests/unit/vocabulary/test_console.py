"""Messages of the program, on consoles that are gone, full or limited to ASCII."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_train.console import printable, say

ROOT = Path(__file__).parents[3]
PRINTS = f"""
import logging, os, sys, warnings
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


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=250, check=False, **options
    )


@pytest.mark.parametrize("gone", ["stdout", "both"])
def test_a_program_outlives_its_console(gone: str) -> None:
    """Its output is discarded if no process reads the pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {name: writer for name in ("stdout", "stderr") if gone in (name, "both")}
    kept = {name: subprocess.PIPE for name in ("stdout", "stderr") if name not in streams}
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], **streams, **kept, timeout=250, check=False
    )  # type: ignore[call-overload]
    os.close(writer)
    assert done.returncode == 0, done.stderr
    if gone == "stdout":
        assert done.stderr.count(b"hvd-train: of the program") == 3
        assert b"Error" not in done.stderr


@pytest.mark.parametrize(("stream", "unbuffered"), [("stdout", "1"), ("stderr", "")])
def test_a_line_is_written_as_one_piece(stream: str, unbuffered: str) -> None:
    """Launchers prefix each piece with a rank; PYTHONUNBUFFERED must not break lines."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    program = (
        "import sys; from hvd_train.console import outlive; outlive(); print('a', "
        f"'line', file=sys.{stream})"
    )
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(ROOT)}
    with ours, theirs:
        subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            check=True,
            timeout=120,
            **{stream: theirs},
        )
        assert ours.recv(100) == b"a line\n"


def test_a_name_that_the_console_cannot_show_is_escaped() -> None:
    """Such as in a container without a locale."""
    code = "import sys; from hvd_train import console; console.outlive(); "
    code += r"console.show('gr\u00fcn \u732b \udcff'); console.say('gr\u00fcn'); print('\u732b')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    done = run([sys.executable, "-c", code], env=environment)
    assert (done.returncode, done.stderr) == (0, "hvd-train: gr\\xfcn\n")
    assert done.stdout == "gr\\xfcn \\u732b \\udcff\n\\u732b\n"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_the_number_of_a_closed_stream_is_not_reused_for_a_file(closed: str) -> None:
    """Otherwise the next file, such as a checkpoint, would get the output of native code."""
    code = PRINTS + "file = open('file', 'wb')\nos.write(1, b'native')\nos.write(2, b'native')\n"
    done = run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code])
    assert done.returncode == 0, done.stderr
    assert Path("file").read_bytes() == b""


HOSTILE = "a\x1b]0;title\x07\x1b[2J\x7f\x9b31m\u202egnp\u2066\r\nb\tc"


def test_control_characters_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """So are C1 controls and changes of the text direction; letters of any language stay."""
    assert (
        printable(HOSTILE)
        == "a\ufffd]0;title\ufffd\ufffd[2J\ufffd\ufffd31m\ufffdgnp\ufffd\ufffd\ufffdb\ufffdc"
    )
    assert printable(HOSTILE, keep="\n\t").endswith("\ufffd\nb\tc")
    assert printable("grün 猫 שלום") == "grün 猫 שלום"
    say(HOSTILE)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (
        "",
        f"hvd-train: {printable(HOSTILE, keep=chr(10) + chr(9))}\n",
    )

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


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, text=True, check=False, **options)


@pytest.mark.parametrize("gone", [["stdout"], ["stdout", "stderr"]])
def test_a_program_outlives_its_console(gone: list[str]) -> None:
    """Its output is discarded if no process reads the pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stderr": subprocess.PIPE, **dict.fromkeys(gone, writer)}
    done = run(sys.executable, "-c", PRINTS, **streams)
    os.close(writer)
    assert done.returncode == 0, done.stderr
    if "stderr" not in gone:
        assert done.stderr.count("hvd-train: of the program") == 3
        assert "Error" not in done.stderr


@pytest.mark.parametrize(("stream", "unbuffered"), [("stdout", "1"), ("stderr", "")])
def test_a_line_is_written_as_one_piece(stream: str, unbuffered: str) -> None:
    """Launchers prefix each piece with a rank; PYTHONUNBUFFERED must not break lines."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    code = "import sys; from hvd_train.console import outlive; outlive(); "
    code += f"print('a', 'line', file=sys.{stream})"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(ROOT)}
    with ours, theirs:
        done = run(sys.executable, "-c", code, env=environment, **{stream: theirs})
        assert done.returncode == 0
        assert ours.recv(100) == b"a line\n"


def test_a_name_that_the_console_cannot_show_is_escaped() -> None:
    """Such as in a container without a locale."""
    code = "import sys; from hvd_train import console; console.outlive(); "
    code += r"console.show('gr\u00fcn \u732b \udcff'); console.say('gr\u00fcn'); print('\u732b')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    done = run(sys.executable, "-c", code, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "hvd-train: gr\\xfcn\n")
    assert done.stdout == "gr\\xfcn \\u732b \\udcff\n\\u732b\n"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_the_number_of_a_closed_stream_is_not_reused_for_a_file(closed: str) -> None:
    """Otherwise the next file, such as a checkpoint, would get the output of native code."""
    code = PRINTS + "file = open('file', 'wb')\nos.write(1, b'native')\nos.write(2, b'native')\n"
    shell = f'exec "$0" -c "$1" {closed}'
    done = run("sh", "-c", shell, sys.executable, code, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert Path("file").read_bytes() == b""


HOSTILE = "a\x1b]0;title\x07\x1b[2J\x7f\x9b31m\u202egnp\u2066\r\nb\tc"


def test_control_characters_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """So are C1 controls and changes of the text direction; letters of any language stay."""
    one_line = "a\ufffd]0;title\ufffd\ufffd[2J\ufffd\ufffd31m\ufffdgnp\ufffd\ufffd\ufffdb\ufffdc"
    assert printable(HOSTILE) == one_line
    assert printable("grün 猫 שלום") == "grün 猫 שלום"
    lines = printable(HOSTILE, keep="\n\t")
    assert lines.endswith("\ufffd\nb\tc")
    say(HOSTILE)
    assert capsys.readouterr() == ("", f"hvd-train: {lines}\n")

"""The output of each rank: whole lines, and a file per rank with `--log-dir`. No torch."""

import atexit
import contextlib
import io
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hvd_train.errors import UsageError
from hvd_train.launch import launcher
from hvd_train.plain_file import in_place

_files: list[int] = []


def whole_lines() -> None:
    """Make this process write each line at once and in one piece; escape letters that the console cannot show.

    With PYTHONUNBUFFERED, as in containers, print() writes a line in two pieces, and mpirun puts a rank before each.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not so in a notebook
            stream.reconfigure(line_buffering=True, write_through=False, errors="backslashreplace")


def name_of(environ: Mapping[str, str]) -> str:
    """Return the name of this rank's file: `rank-3.log`, or `HOST-SLOT.log` in an elastic job, whose ranks change."""
    if launcher.elastic(environ):
        return f"{socket.gethostname()}-{launcher.slot(environ)}.log"
    launched = launcher.launched(environ)
    return f"rank-{launched.rank if launched else 0}.log"


def start(folder: Path, environ: Mapping[str, str]) -> None:
    """Append later output of this process and its children to a file in `folder`, once. May raise UsageError."""
    if _files:
        return
    path = folder / name_of(environ)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = in_place(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise UsageError(f"--log-dir {folder}: {path.name} cannot be written ({error.strerror})") from None
    _files.append(file)
    saved = []
    tees = []
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        number = stream.fileno()
        saved.append((os.dup(number), number))
        # Own session: a signal that ends this process must not end tee before the last output. No SIGPIPE either, in
        # case its other reader is gone. /proc names the file that is open here, even if it was renamed.
        line = ["tee", "-a", f"/proc/self/fd/{file}"]
        tee = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=number, pass_fds=[file], start_new_session=True, restore_signals=False
        )
        assert tee.stdin is not None
        os.dup2(tee.stdin.fileno(), number)
        tee.stdin.close()
        tees.append(tee)

    def finish() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for old, number in saved:
            os.dup2(old, number)
        for tee in tees:
            tee.wait()

    atexit.register(finish)


def write(text: str) -> None:
    """Append a text to this rank's file, if it has one."""
    for file in _files:
        with contextlib.suppress(OSError):
            os.write(file, f"{text}\n".encode(errors="backslashreplace"))

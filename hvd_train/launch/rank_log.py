"""What each rank prints: in whole lines, and kept in a file of its own beside where it goes anyway."""

from __future__ import annotations

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

_tees: list[subprocess.Popen[bytes]] = []


def whole_lines() -> None:
    """Write each line at once, under PYTHONUNBUFFERED too, as containers often set it.

    There, print() writes the end of a line after it, and mpirun puts the rank before each piece that it reads.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not so in a notebook
            stream.reconfigure(line_buffering=True, write_through=False)


def name_of(environ: Mapping[str, str]) -> str:
    """rank-3.log; in an elastic job, where ranks change, the place of the worker: node1-0.log."""
    if launcher.elastic(environ):
        return f"{socket.gethostname()}-{launcher.slot(environ)}.log"
    launched = launcher.launched(environ)
    return f"rank-{launched.rank if launched else 0}.log"


def start(folder: Path, environ: Mapping[str, str]) -> None:
    """From here on, add to a file in `folder` whatever this process prints, native code and children included.

    A second call does nothing. Raises UsageError where the file cannot be written.
    """
    if _tees:
        return
    path = folder / name_of(environ)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"--log-dir {folder}: {path.name} cannot be written ({error.strerror})") from None
    kept = []
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        number = stream.fileno()
        kept.append((os.dup(number), number))
        # In a session of its own: what ends this process must not end the tee before its last words are through.
        tee = subprocess.Popen(["tee", "-a", path], stdin=subprocess.PIPE, stdout=number, start_new_session=True)
        assert tee.stdin is not None
        os.dup2(tee.stdin.fileno(), number)
        tee.stdin.close()
        _tees.append(tee)

    def finish() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for old, number in kept:
            os.dup2(old, number)
        for tee in _tees:
            tee.wait()

    atexit.register(finish)

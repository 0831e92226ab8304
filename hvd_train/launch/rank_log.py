"""What each rank prints: written in whole lines, and with `--log-dir` kept in a file per rank as well. No torch."""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from hvd_train.errors import UsageError
from hvd_train.launch import launcher

_tees: list[subprocess.Popen[bytes]] = []
_streams: list[tuple[io.TextIOWrapper, io.TextIOWrapper]] = []


class LastingStream(io.TextIOWrapper):
    """A text stream that falls silent where its reader is gone: what is written then is lost, and no error is raised.

    The reader of a rank's output is its launcher, its ssh, or `head`. None of them is worth a training.
    """

    @override
    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._fall_silent(error)
            return len(text)

    @override
    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._fall_silent(error)
            super().flush()  # what was kept back, so that it is not kept for ever

    def _fall_silent(self, error: OSError) -> None:
        """Lead the file descriptor, which native code and child processes write to as well, to nowhere."""
        if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: a terminal that was closed
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def whole_lines() -> None:
    """Make this process write each line at once and as one piece, also under PYTHONUNBUFFERED, to streams that last.

    Containers often set that variable. With it print() writes the end of a line separately, and mpirun, which puts the
    rank before each piece that it reads, breaks the lines.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # not so in a notebook
            stream.reconfigure(line_buffering=True, write_through=False)
        if type(stream) is io.TextIOWrapper:
            # Beside the old one, which loggers may hold, and for ever: the last reference closes the file.
            lasting = LastingStream(stream.buffer, stream.encoding, stream.errors, line_buffering=True)
            _streams.append((stream, lasting))
            setattr(sys, name, lasting)


def name_of(environ: Mapping[str, str]) -> str:
    """Return the name of this rank's file: `rank-3.log`, or in an elastic job, where ranks change, `HOST-SLOT.log`."""
    if launcher.elastic(environ):
        return f"{socket.gethostname()}-{launcher.slot(environ)}.log"
    launched = launcher.launched(environ)
    return f"rank-{launched.rank if launched else 0}.log"


def start(folder: Path, environ: Mapping[str, str]) -> None:
    """Append all that this process prints from now on to a file in `folder`, native code and child processes included.

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
    saved = []
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        number = stream.fileno()
        saved.append((os.dup(number), number))
        # In a session of its own: a signal that ends this process must not end tee before the last output is through.
        # Nor must SIGPIPE, which Python ignores, end it where its other reader is gone: the file goes on.
        tee = subprocess.Popen(
            ["tee", "-a", path], stdin=subprocess.PIPE, stdout=number, start_new_session=True, restore_signals=False
        )
        assert tee.stdin is not None
        os.dup2(tee.stdin.fileno(), number)
        tee.stdin.close()
        _tees.append(tee)

    def finish() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for old, number in saved:
            os.dup2(old, number)
        for tee in _tees:
            tee.wait()

    atexit.register(finish)

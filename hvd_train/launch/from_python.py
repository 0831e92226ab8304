"""Ranks for a Python program or a notebook: each calls a function, and the value of rank 0 comes back. No torch."""

from __future__ import annotations

import codecs
import fcntl
import json
import linecache
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from hvd_train import plugin
from hvd_train.errors import HvdTrainError, RankLost, UsageError
from hvd_train.launch import horovodrun, last_word, own_pickle, start
from hvd_train.launch.called import ALIVE, CALL, FACTS, VALUE
from hvd_train.launch.launcher import CALLER

T = TypeVar("T")
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); import json, os; "  # no json.py of the current folder
    f"sys.path[:] = json.load(open(os.environ['{CALLER}'] + '/{FACTS}'))['path']; "  # the modules that we have
    "from hvd_train.launch.called import main; main()"
)


def start_ranks(function: Callable[..., T], /, *args: Any, np: int, **kwargs: Any) -> T:
    """Call `function(*args, **kwargs)` on `np` ranks of this machine, and return what it returns on rank 0.

    It is made for notebooks: the function, what it uses and what it returns may be defined in cells. The ranks are new
    processes, started by horovodrun as `hvd-train train --np` does, so that this one may have used a GPU before. What
    they print is printed here. Where the function fails on a rank, all ranks are ended, and one HvdTrainError has the
    traceback of that code; errors of hvd_train come as what they are. A KeyboardInterrupt ends the ranks as Ctrl-C
    does, after a commit, and is raised when they have ended; they also end where this process does. Raises UsageError
    where this process is a rank itself, where `np` is no number of ranks, and for what cannot be sent from one process
    to another.
    """
    start.refuse_in_ranks("start_ranks", os.environ)
    if not callable(function):
        raise UsageError("start_ranks: the first argument must be a function; its own arguments come after it")
    if isinstance(np, bool) or not isinstance(np, int) or np < 1:
        raise UsageError(f"start_ranks: np={np!r} must be a number of ranks, a whole one from 1 on")
    line = [*horovodrun.line(np, None, "gloo"), sys.executable, "-c", _PROGRAM]
    with TemporaryDirectory(prefix="hvd_train-") as name, _alive(folder := Path(name)):  # of mode 0700
        _write_call(folder, (function, args, kwargs))
        code = _followed(line, {"HVD_TRAIN_OUTPUT_PREFIX": "errors", **os.environ, CALLER: name})
        if code:
            raise _error(folder, code, np)
        value: T = _value(folder)
        return value


@contextmanager
def _alive(folder: Path) -> Iterator[None]:
    """Hold a lock in the folder as long as this process lives; children that it forks do not have it."""
    with open(folder / ALIVE, "wb") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _write_call(folder: Path, call: object) -> None:
    of_script = hasattr(sys.modules["__main__"], "__file__")  # not so in a notebook, whose argv is the kernel's
    facts = {"path": [*map(str, sys.path)], "argv": sys.argv if of_script else [""], "cells": _cells()}
    try:
        (folder / FACTS).write_text(json.dumps(facts))
        own_pickle.write(folder / CALL, call)
    except OSError as error:
        raise UsageError(f"start_ranks: {folder} cannot be written: {error.strerror}") from None
    except Exception as error:  # whatever the user's classes raise
        raise UsageError(
            f"start_ranks: the function or one of its arguments cannot be sent to the ranks: {plugin.first_line(error)}"
        ) from error


def _cells() -> dict[str, str]:
    """Return the code of notebook cells by the names that tracebacks have for them: no rank finds it in a file."""
    entries = [(name, entry) for name, entry in linecache.cache.items() if len(entry) == 4 and name[:1] != "<"]
    return {name: "".join(entry[2]) for name, entry in entries if entry[1] is None}


def _followed(line: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print what a launcher prints, until it and its ranks have ended, and return its exit code.

    A KeyboardInterrupt is passed on to it as SIGINT, and raised in the end.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    interrupted = False
    # In a session of its own: a terminal's Ctrl-C comes to this process only, which passes it on once.
    with subprocess.Popen(
        line,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            while True:
                try:
                    while piece := os.read(process.stdout.fileno(), 1 << 16):
                        sys.stdout.write(decode(piece))
                        sys.stdout.flush()
                    code = process.wait()
                    break
                except KeyboardInterrupt:
                    interrupted = True
                    process.send_signal(signal.SIGINT)
        finally:
            process.terminate()  # it has ended, unless what it prints cannot be printed here
    if interrupted:
        raise KeyboardInterrupt
    return code


def _error(folder: Path, code: int, ranks: int) -> HvdTrainError:
    """Return the error of a job that failed: that of the first rank that has more to say than that another is lost."""
    words = dict[int, last_word.LastWord]()
    for rank in range(ranks):
        with suppress(OSError, ValueError, TypeError):  # a rank that was killed has said nothing
            words[rank] = last_word.heard((folder / last_word.file_of(rank)).read_text())
    told = [(word.exit_code == RankLost.exit_code, rank) for rank, word in words.items() if word.error]
    if not told:
        return HvdTrainError(f"the ranks ended with exit code {code}: what they have printed says why")
    _, rank = min(told)
    word = words[rank]
    kinds = {kind.exit_code: kind for kind in HvdTrainError.__subclasses__()}
    kind = kinds.get(word.exit_code, HvdTrainError)
    return kind(word.error if rank == 0 and kind is not HvdTrainError else f"rank {rank}: {word.error}")


def _value(folder: Path) -> Any:
    try:
        return own_pickle.read(folder / VALUE)
    except FileNotFoundError:
        raise HvdTrainError("rank 0 has ended before the function returned") from None
    except Exception as error:  # whatever the user's classes raise
        raise UsageError(f"what the function returned cannot be read here: {plugin.first_line(error)}") from error

"""A rank that a Python program or a notebook has started (`from_python`): it calls the function that it was given.

The program's folder holds the call, a file `alive` that the program has locked as long as it lives, and at the end what
the function returned on rank 0, and the last word of each rank that failed.
"""

from __future__ import annotations

import fcntl
import json
import linecache
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hvd_train import plugin
from hvd_train.errors import UsageError
from hvd_train.launch import crashes, last_word, own_pickle, rank_log, roll_call
from hvd_train.launch.error_report import exit_for
from hvd_train.launch.launcher import CALLER, GRACE

FACTS, CALL, VALUE, ALIVE = "facts.json", "call.pickle", "value.pickle", "alive"
_GRACE_S = 5.0  # as horovodrun has it


def main() -> None:
    """Call the function of the program that has started this rank; what becomes of it is for the program to tell."""
    folder = Path(os.environ[CALLER])
    _end_with_caller(folder)
    rank_log.whole_lines()
    crashes.tell_where(os.environ)
    facts = json.loads((folder / FACTS).read_text())
    sys.argv[:] = facts["argv"]
    for name, source in facts["cells"].items():
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    roll_call.started(os.environ)
    own_pickle.send_by_value()
    with last_word.exit_code_told(os.environ):
        try:
            function, args, kwargs = _call(folder)
            value = function(*args, **kwargs)
            if os.environ["HOROVOD_RANK"] == "0":
                _give(folder, value)
        except Exception as error:
            exit_for(error)
            raise


def _call(folder: Path) -> Any:
    try:
        return own_pickle.read(folder / CALL)
    except Exception as error:  # whatever the user's classes and modules raise
        raise UsageError(f"a rank cannot make the function and its arguments: {plugin.first_line(error)}") from error


def _give(folder: Path, value: object) -> None:
    try:
        own_pickle.write(folder / VALUE, value)
    except OSError as error:
        raise UsageError(f"what the function returned cannot be written to {folder}: {error.strerror}") from None
    except Exception as error:  # whatever the user's classes raise
        raise UsageError(
            f"the function returned a {type(value).__name__}, which cannot be pickled "
            f"({plugin.first_line(error)}): let it return numbers, texts, tensors and the like, or nothing"
        ) from error


def _end_with_caller(folder: Path) -> None:
    """End this process as by a signal of its launcher as soon as the program is gone, also by `kill -9`.

    The launcher does not see that: it is a process of its own, so that Ctrl-C comes to it once.
    """
    lock = open(folder / ALIVE, "rb")  # noqa: SIM115  # held until the process ends

    def watch() -> None:
        fcntl.lockf(lock, fcntl.LOCK_SH)  # waits for the program's end
        shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_grace_s())
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="caller").start()


def _grace_s() -> float:
    try:
        return float(os.environ[GRACE])
    except (KeyError, ValueError):
        return _GRACE_S

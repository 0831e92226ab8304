"""A worker's last word to the driver of its elastic job: its exit code, and the error that ends it. No torch.

The driver prints an error once, however many workers end with it, and need not wait for the end of the process. It
reads exit codes from that process, on another host from its ssh; where the ssh has failed, this is all it learns, and
where a library crashes at exit, this is what the process meant. A rank that a Python program has started leaves it in
that program's folder, and the program raises it.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hvd_train import user_code
from hvd_train.errors import HvdTrainError
from hvd_train.launch import client, rank_log
from hvd_train.launch.launcher import CALLER, WORKER

_ANSWER_S = 2.0
During = Literal["building", "meeting", "training"]
"""What a worker was doing: it had not met the others yet, it met them, or it had come to one state with them."""


@dataclass(frozen=True)
class LastWord:
    """How a worker ends."""

    exit_code: int
    """The exit code that it means to end with, whatever becomes of it in the exit handlers of its libraries."""
    error: str = ""
    """The error that ends it: a line for the user, or a traceback; empty where there is none to print."""
    during: During = "building"
    step: int = 0
    """Steps done by then."""


def say(environ: Mapping[str, str], word: LastWord) -> bool:
    """Send `word` to our driver, or to the program that has called us; return False where neither can be reached."""
    if CALLER in environ:
        return _written(Path(environ[CALLER], file_of(int(environ["HOROVOD_RANK"]))), word)
    if WORKER not in environ:
        return False
    try:
        client.put(environ, f"last_word/{environ[WORKER]}", json.dumps(asdict(word)), _ANSWER_S)
    except OSError:
        return False
    return True


def file_of(rank: int) -> str:
    """Return the name of the file that has the last word of a rank, in the folder of the program that has called it."""
    return f"last_word-{rank}.json"


def _written(path: Path, word: LastWord) -> bool:
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(asdict(word)))
        os.replace(partial, path)
    except OSError:
        return False
    return True


def heard(text: str | bytes) -> LastWord:
    """Return the last word that `say` has sent as `text`. Raises ValueError or TypeError where it is none."""
    return LastWord(**json.loads(text))


_told: list[BaseException] = []  # the error that ends this process, once the driver has it


def tell(environ: Mapping[str, str], error: Exception, during: During = "building", step: int = 0) -> bool:
    """Send the error that ends this process to our driver or caller, who tells it; a second call sends it no more.

    Returns False where there is neither, or they cannot be reached: then the error is for this process to print.
    """
    if error in _told:
        return True
    if isinstance(error, HvdTrainError):
        word = LastWord(error.exit_code, str(error), during, step)
    else:
        text = user_code.told(error) or "".join(traceback.format_exception(error)).rstrip()
        word = LastWord(1, text, during, step)
    if not say(environ, word):
        return False
    rank_log.write(word.error)
    _told[:] = [error]
    return True


@contextmanager
def exit_code_told(environ: Mapping[str, str]) -> Iterator[None]:
    """Tell our driver the exit code with which the block ends: that of its SystemExit, or 1 for any other error.

    Nothing is said outside elastic jobs, after a block without an error, or where the driver has the error already.
    """
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if not _told:
            say(environ, LastWord(0 if code is None else code if isinstance(code, int) else 1))
        raise

"""Send the exit report of a worker to the driver of its elastic job: its exit code and its error. No torch.

The driver prints an error once for all workers that report it. The exit report counts if the process's own exit code
is useless: a signal killed it, its ssh failed, or a library crashed at exit.
"""

import json
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

from hvd_train.errors import HvdTrainError
from hvd_train.launch import client, rank_log
from hvd_train.launch.launcher import WORKER

_ANSWER_S = 2.0
During = Literal["building", "meeting", "training"]
"""The phase of a worker: before its first rendezvous, in one, or after the ranks synchronized the state."""


@dataclass(frozen=True)
class LastWord:
    """The exit report of a worker."""

    exit_code: int
    """The exit code of the process, unless it crashes in the exit handlers of its libraries."""
    error: str = ""
    """A line for the user, or a traceback; empty if there is no error to print."""
    during: During = "building"
    step: int = 0
    """Finished steps."""


def say(environ: Mapping[str, str], word: LastWord) -> bool:
    """Send `word` to our driver; return False if there is none or it cannot be reached."""
    if WORKER not in environ:
        return False
    try:
        client.put(environ, f"last_word/{environ[WORKER]}", json.dumps(asdict(word)), _ANSWER_S)
    except OSError:
        return False
    return True


def heard(text: str | bytes) -> LastWord:
    """Parse an exit report that `say` sent. Raises ValueError or TypeError if `text` is none."""
    return LastWord(**json.loads(text))


_sent: list[BaseException] = []  # the error that ends this process, once the driver has it


def tell(environ: Mapping[str, str], error: Exception, during: During = "building", step: int = 0) -> bool:
    """Send the error that ends this process to our driver, once; return False if this process must print it."""
    if error in _sent:
        return True
    if isinstance(error, HvdTrainError):
        word = LastWord(error.exit_code, str(error), during, step)
    else:
        word = LastWord(1, "".join(traceback.format_exception(error)).rstrip(), during, step)
    if not say(environ, word):
        return False
    rank_log.write(word.error)
    _sent[:] = [error]
    return True


@contextmanager
def exit_code_told(environ: Mapping[str, str]) -> Iterator[None]:
    """Send the exit code to our driver if an error ends the block and the driver does not have that error yet."""
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if not _sent:
            say(environ, LastWord(0 if code is None else code if isinstance(code, int) else 1))
        raise

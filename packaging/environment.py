#!/usr/bin/env python3
"""Set up this checkout's .venv: the pinned packages, Horovod and this package. `make env` runs it.

Everything that is missing on the machine is listed first, before anything is downloaded. Each step prints
one line; all other output goes to build/setup.log. Steps that are done are not repeated, and a set-up that
was interrupted continues where it stopped.

This program uses the standard library only, and no syntax newer than Python 3.6, so that an old Python
prints a line of advice instead of a SyntaxError.
"""

import argparse
import fcntl
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Iterator, List, Optional, Tuple

# Import from the folder of this file even where Python is not to look there by itself (PYTHONSAFEPATH).
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from environment_setup.checkout import Checkout
from environment_setup.preflight import NEWEST_PYTHON, python_problems
from environment_setup.show import say
from environment_setup.state import why_anew
from environment_setup.steps import Setup, SetupError

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def locked(checkout: Checkout) -> Iterator[IO[str]]:
    """Let one set-up at a time run in a checkout. The lock ends with the process that holds it, however it ends."""
    path = checkout.root / "build" / "setup.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("==> another set-up is running in this checkout: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def continue_inside(checkout: Checkout, chosen: Optional[Tuple[int, int]]) -> None:
    """Replace this process by the Python of a usable environment, which may have another version or other headers.

    Returns where there is no usable environment. Raises OSError where its Python cannot be started.
    """
    if why_anew(checkout, chosen) is None:
        arguments = [str(checkout.python), os.path.abspath(__file__), *sys.argv[1:], "--inside"]
        os.execv(arguments[0], arguments)  # noqa: S606  # needs no shell


def main(arguments: Optional[List[str]] = None) -> int:
    """Set up the environment and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chosen", action="store_true", help="the user chose this Python: .venv must have it")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    checkout = Checkout(ROOT)
    here = sys.version_info[:2]
    chosen = here if options.chosen else None
    try:
        if not options.inside:
            continue_inside(checkout, chosen)
        problems = python_problems(here)
        if problems:
            raise SetupError(*problems)
        with locked(checkout) as lock:
            setup = Setup(checkout, chosen, lock)
            if options.inside and setup.is_complete():
                return 0
            if here > NEWEST_PYTHON:
                say("==> Python {}.{} is newer than those that were tested (3.10 to 3.13)".format(*here))
            setup.run()
    except SetupError as error:
        for line in error.args:
            print("set-up: " + line, file=sys.stderr)
        return 1
    except OSError as error:
        print("set-up: {}: {}".format(error.strerror or error, error.filename or ""), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: stopped; the same command continues from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

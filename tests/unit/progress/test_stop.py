"""A wish to stop: signals are noted, and a second one acts as usual."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvd_train.errors import RankLost
from hvd_train.progress.stop import StopSignal

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_noted_and_not_acted_on(number: signal.Signals) -> None:
    """The first one is a wish; after the block everything is as before."""
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number
    assert signal.getsignal(number) == before


def test_a_second_signal_ends_the_process_as_usual() -> None:
    """Ctrl-C twice is Ctrl-C."""
    with pytest.raises(KeyboardInterrupt), StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_termination_ends_the_process() -> None:
    """So does SIGTERM twice, with the code that launchers expect."""
    code = (
        f"import os, signal, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from hvd_train.progress.stop import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print('noted', stop.received, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "noted 15\n")


def test_an_error_says_whether_the_process_was_asked_to_end() -> None:
    """A signal that comes after the error, while the training is closed, counts too: the launcher sends no second."""
    errors = [RankLost("gone"), RankLost("gone, and the launcher knew")]
    for error in errors:
        with pytest.raises(RankLost), StopSignal():
            try:
                raise error
            finally:
                if error is errors[1]:
                    os.kill(os.getpid(), signal.SIGTERM)
    assert [error.asked_to_end for error in errors] == [False, True]


def test_hangups_never_end_the_process() -> None:
    """A terminal that is gone says so several times, also while a commit is written that another signal wished for."""
    before = signal.getsignal(signal.SIGHUP)
    for first in (signal.SIGHUP, signal.SIGTERM):
        with StopSignal() as stop:
            os.kill(os.getpid(), first)
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received == first
    assert signal.getsignal(signal.SIGHUP) == before


@pytest.mark.parametrize("why", ["nohup", "elastic"])
def test_a_hangup_may_mean_nothing(why: str) -> None:
    """Under nohup it is ignored already, and a worker's ssh may be lost while its job goes on; others count."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if why == "nohup" else signal.getsignal(signal.SIGHUP)
    try:
        with StopSignal(hangup=why == "nohup") as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.received == signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_nothing_is_touched() -> None:
    """Python lets only the main thread handle signals; training in a thread works all the same."""
    seen = []

    def body() -> None:
        with StopSignal() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.received))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(before, None)]

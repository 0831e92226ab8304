"""Stop signals: the first one is noted, and a second one acts as usual."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvd_train.errors import RankLost
from hvd_train.progress import stop as stop_module
from hvd_train.progress.stop import StopSignal, reading

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "signals",
    ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP SIGHUP SIGTERM SIGHUP", "SIGTERM SIGHUP SIGHUP"],
)
def test_signals_are_noted_and_not_acted_on(signals: str) -> None:
    """Hangups never end the process, nor does a signal that comes with them: it is the first of
    its kind.
    """
    numbers = [signal.Signals[name] for name in signals.split()]
    before = [*map(signal.getsignal, numbers)]
    with StopSignal() as stop:
        assert stop.received is None
        for number in numbers:
            signal.raise_signal(number)
        assert stop.received == numbers[0]
    assert [*map(signal.getsignal, numbers)] == before


def test_a_signal_ends_a_long_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may not answer for minutes, and the launcher kills the rank before."""
    monkeypatch.setattr(stop_module, "_LONGEST_READ_S", 0.01)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(SystemExit) as ended, StopSignal():
        signal.raise_signal(signal.SIGTERM)
        with reading:
            threading.Event().wait(60)
    assert ended.value.code == 128 + signal.SIGTERM
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]) == (
        before,
        0,
    )


def test_a_second_signal_ends_the_process_as_usual() -> None:
    code = (
        f"import signal, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from hvd_train.progress.stop import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    signal.raise_signal(signal.SIGTERM); print('noted', stop.received, flush=True)\n"
        "    signal.raise_signal(signal.SIGTERM); print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "noted 15\n")


def test_an_error_says_whether_the_process_was_asked_to_end() -> None:
    """A signal that comes after the error counts too: the launcher sends no second one."""
    for is_asked in (False, True):
        with pytest.raises(RankLost) as lost, StopSignal():
            try:
                raise RankLost("gone")
            finally:
                if is_asked:
                    signal.raise_signal(signal.SIGTERM)
        assert lost.value.asked_to_end == is_asked


@pytest.mark.parametrize("nohup", [True, False])
def test_a_hangup_is_ignored_under_nohup_and_in_elastic_workers(nohup: bool) -> None:
    """The ssh of an elastic worker may be lost while its job continues."""
    before = signal.getsignal(signal.SIGHUP)
    if nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal(hangup=nohup) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.received is None
            signal.raise_signal(signal.SIGTERM)
            assert stop.received == signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before)

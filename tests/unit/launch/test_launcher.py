"""What the surroundings tell a process: launchers, signals and clocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvd_train.config import Config
from hvd_train.launch.launcher import Launch, launched
from hvd_train.output import shows_bar
from hvd_train.progress.clock import Stopwatch, Timer
from hvd_train.progress.stop import StopSignal
from hvd_train.world.world import Place

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, Launch("horovodrun", 1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, Launch("Open MPI", 3, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "8"}, Launch("MPICH", 0, 8)),
        (
            {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "9"},
            Launch("horovodrun", 1, 2),
        ),
        ({"HOROVOD_RANK": "1"}, None),
        ({"PMI_RANK": "", "PMI_SIZE": "x"}, None),
    ],
)
def test_launchers_are_known_by_what_they_set(environment: dict[str, str], expected: Launch | None) -> None:
    """A process is one of a group, or alone."""
    assert launched(environment) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_speed_counts_training_alone() -> None:
    """Neither the first five steps, nor an evaluation, nor the time between it and the next step, count."""
    clock = Clock()
    watch = Stopwatch(clock)
    assert watch.images_per_second == 0.0
    for seconds in (30, 1, 1, 1, 1):
        clock.time += seconds
        watch.step(10)
    assert watch.images_per_second == 0.0
    for seconds in (2, 3):
        clock.time += seconds
        watch.step(10)
    assert watch.images_per_second == 20 / 5
    clock.time += 1  # the loader's wait for the end of the epoch is training
    with watch.paused():
        clock.time += 1000
    clock.time += 4
    watch.step(30)
    assert watch.images_per_second == 50 / 10


def test_a_timer_is_due_when_its_time_has_come() -> None:
    """And anew after a reset; without a limit never."""
    clock = Clock()
    timer, never = Timer(5, clock), Timer(None, clock)
    clock.time += 4.9
    assert not timer.due
    clock.time += 0.1
    assert timer.due
    timer.reset()
    assert not timer.due
    clock.time += 1e9
    assert timer.due
    assert not never.due


@pytest.mark.parametrize(("environment", "bar"), [({}, True), ({"OMPI_COMM_WORLD_SIZE": "1"}, False)])
def test_a_rank_of_mpirun_prints_lines(environment: dict[str, str], bar: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI gives a rank a terminal even where its own output goes to a file, which a bar would fill."""
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert shows_bar(Config(), Place()) == bar

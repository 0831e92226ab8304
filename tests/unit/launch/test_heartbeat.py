"""What the driver requests of a worker by its answers and its silence, and
who sends the heartbeats.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from unittest.mock import Mock

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.elastic.dispatcher import Dispatcher
from hvd_train.elastic.driver import DriverServer, handler
from hvd_train.launch import client, heartbeat
from hvd_train.launch.heartbeat import Watch
from hvd_train.launch.workers import WORKER
from tests.support.launching import wait_for

NOTHING: Mapping[int, str] = MappingProxyType({})
# A worker whose C code holds Python's lock, like a long json.loads.
HOLDS_LOCK = """
import ctypes, os, subprocess, sys
subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), "0.05"], stdin=subprocess.PIPE)
ctypes.PyDLL(None).sleep(1000)
"""


def lines_after(
    answers: list[str],
    events: Mapping[int, str] = NOTHING,
    pauses: Mapping[int, float] = MappingProxyType({}),
) -> list[str]:
    """Return the line after each heartbeat, one a second, until the worker is killed ("over").

    The driver gives these answers ("": none). `events` of the worker come after a heartbeat by
    number (from 1), as do `pauses` in seconds.
    """
    now = 1000.0
    found = list[str]()
    watch = Watch(now)
    for number, answer in enumerate(answers, 1):
        found.append(watch.beat(answer or None, now))
        if watch.is_over:
            return [*found, "over"]
        now += 1.0 + pauses.get(number, 0.0)
        if number in events:
            watch.event(events[number])
    return found


ANSWERS = st.lists(
    st.tuples(st.sampled_from(["train", "change", "stop", "end", ""]), st.integers(1, 12)),
    max_size=8,
)


@given(ANSWERS, st.sets(st.integers(0, 40)))
def test_the_driver_decides_while_it_answers(
    runs: list[tuple[str, int]], signals: set[int]
) -> None:
    """It may withdraw a change, but neither a stop nor an eviction; an
    evicted worker stops no other.
    """
    answers = [answer for answer, times in runs for _ in range(times)]
    lines = lines_after(answers, dict.fromkeys(signals, "signal"))
    silence = -1
    asked = ""
    for number, (answer, line) in enumerate(zip(answers, lines, strict=False)):
        silence = 0 if answer else silence + 1
        is_alone = silence > (3 if any(0 < event <= number for event in signals) else 10)
        if asked not in ("stop", "end"):
            asked = "stop" if is_alone else answer or asked
        if line == "over":
            assert silence > 40 or "end" in answers
            break
        assert line.replace("gone", "stop") == {"end": "change", "": "train"}.get(asked, asked)


def test_a_worker_without_a_driver_stops_and_then_ends() -> None:
    """It commits after 10 s of silence, and ends within the next 30 s."""
    assert lines_after(["train", *[""] * 9, "train"]) == ["train"] * 11
    assert lines_after([""] * 41) == [*["train"] * 11, *["gone"] * 30]
    assert lines_after([*[""] * 12, "train"]) == [*["train"] * 11, "gone", "stop"]
    assert lines_after([""] * 42)[-1] == "over"


def test_a_worker_that_was_paused_does_not_stop() -> None:
    """The driver may resume later than the worker."""
    answers = [*["train"] * 3, *[""] * 8, *["train"] * 3]
    assert lines_after(answers, pauses={3: 300.0, 12: 20.0}) == ["train"] * 14
    assert lines_after([*["train"] * 3, *[""] * 30], pauses={3: 20.0})[-1] == "gone"
    assert lines_after(["train", *[""] * 60], pauses={1: 20.0})[-1] == "over"


def test_an_evicted_worker_ends() -> None:
    assert "over" not in lines_after([*[""] * 35, *["end"] * 40])
    assert lines_after(["end"] * 50)[-1] == "over"


def test_a_worker_may_finish_its_last_commit_without_a_driver() -> None:
    """A large state takes minutes."""
    left = {5: "write"}
    assert "over" not in lines_after([""] * 500, left)
    assert lines_after([""] * 700, left)[-1] == "over"


class Heard(Dispatcher):
    """Counts heartbeats of a worker; `ceased` is set once its connection ends."""

    def __init__(self) -> None:
        super().__init__(Mock(worlds_formed=0), Mock(), Mock(), Mock(), threading.Event())
        self.count = 0
        self.ceased = threading.Event()

    def heartbeats(self, number: int, known: str, connection: socket.socket) -> str:
        try:
            return super().heartbeats(number, known, connection)
        finally:
            if known:
                self.ceased.set()

    def heartbeat_received(self, number: int) -> str:
        self.count += number == 1007
        return "train"


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    server = DriverServer()
    found = Heard()
    for name, value in {
        client.KEY: "the key",
        WORKER: "1007",
        client.ADDRESS: client.LOOPBACK,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(client.PORT, str(server.start(handler(found, server))))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    yield found
    server.stop()


def test_heartbeats_need_a_live_worker_but_not_its_python(heard: Heard) -> None:
    """They continue while its C code holds the lock, cease while it is stopped, and end with it."""
    with subprocess.Popen([sys.executable, "-c", HOLDS_LOCK, heartbeat.__file__]) as worker:
        wait_for("heartbeats", lambda: heard.count >= 4)
        (sender,) = psutil.Process(worker.pid).children()
        for number in (signal.SIGTERM, signal.SIGINT):  # they are for the worker
            sender.send_signal(number)
        worker.send_signal(signal.SIGSTOP)
        assert heard.ceased.wait(60)
        before = heard.count
        worker.send_signal(signal.SIGCONT)
        wait_for("more heartbeats", lambda: heard.count >= before + 2)
        worker.kill()
        psutil.wait_procs([sender], timeout=60)
        assert not sender.is_running()

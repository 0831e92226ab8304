"""What the driver requests of a worker by its answers and its silence, and
who sends the heartbeats.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
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

NOTHING = MappingProxyType({})
WORDS = {word[0]: word for word in ("train", "change", "stop", "end")}
# A worker whose C code holds Python's lock, like a long json.loads.
HOLDS_LOCK = """
import ctypes, os, subprocess, sys
subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), "0.05"], stdin=subprocess.PIPE)
ctypes.PyDLL(None).sleep(1000)
"""


def lines_after(
    answers: str, events: Mapping[int, str] = NOTHING, pauses: Mapping[int, float] = NOTHING
) -> str:
    """Return the line after each heartbeat, one a second, until the worker is killed ("!").

    Letters stand for words: train, change, stop, end and gone. The driver gives these answers
    (".": none). `events` of the worker come after a heartbeat by number (from 1), as do `pauses` in
    seconds.
    """
    now = 1000.0
    found = ""
    watch = Watch(now)
    for number, letter in enumerate(answers, 1):
        found += watch.beat(WORDS.get(letter), now)[0]
        if watch.is_over:
            return found + "!"
        now += 1.0 + pauses.get(number, 0.0)
        if number in events:
            watch.event(events[number])
    return found


ANSWERS = st.lists(st.tuples(st.sampled_from("tcse."), st.integers(1, 12)), max_size=8)


@given(ANSWERS, st.sets(st.integers(0, 40)))
def test_the_driver_decides_while_it_answers(
    runs: list[tuple[str, int]], signals: set[int]
) -> None:
    """It may withdraw a change, but neither a stop nor an eviction; an
    evicted worker stops no other.
    """
    answers = "".join(letter * times for letter, times in runs)
    lines = lines_after(answers, dict.fromkeys(signals, "signal"))
    silence = -1
    asked = "t"
    for number, (answer, line) in enumerate(zip(answers, lines, strict=False)):
        silence = silence + 1 if answer == "." else 0
        is_alone = silence > (3 if any(0 < event <= number for event in signals) else 10)
        if asked not in "se":
            asked = "s" if is_alone else answer.strip(".") or asked
        if line == "!":
            assert silence > 40 or "e" in answers
            break
        # an evicted worker changes, and one without a driver stops
        assert line.replace("g", "s") == asked.replace("e", "c")


def test_a_worker_without_a_driver_stops_and_then_ends() -> None:
    """It commits after 10 s of silence, and ends within the next 30 s."""
    assert lines_after("t" + "." * 9 + "t") == "t" * 11
    assert lines_after("." * 42) == "t" * 11 + "g" * 31 + "!"
    assert lines_after("." * 12 + "t") == "t" * 11 + "gs"


def test_a_worker_that_was_paused_does_not_stop() -> None:
    """The driver may resume later than the worker."""
    assert lines_after("ttt........ttt", pauses={3: 300.0, 12: 20.0}) == "t" * 14
    assert lines_after("ttt" + "." * 30, pauses={3: 20.0})[-1] == "g"
    assert lines_after("t" + "." * 60, pauses={1: 20.0})[-1] == "!"


def test_an_evicted_worker_ends() -> None:
    assert "!" not in lines_after("." * 35 + "e" * 40)
    assert lines_after("e" * 50)[-1] == "!"


def test_a_worker_may_finish_its_last_commit_without_a_driver() -> None:
    """A large state takes minutes."""
    left = {5: "write"}
    assert "!" not in lines_after("." * 500, left)
    assert lines_after("." * 700, left)[-1] == "!"


def test_heartbeats_need_a_live_worker_but_not_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """They continue while its C code holds the lock, cease while it is stopped, and end with it."""
    dispatcher = Dispatcher(Mock(worlds_formed=0), Mock(), Mock(), Mock(), threading.Event())
    received = Mock(return_value="train")
    monkeypatch.setattr(dispatcher, "heartbeat_received", received)
    ceased = threading.Event()
    until_they_cease = dispatcher.heartbeats

    def heartbeats(number, known, connection):
        try:
            return until_they_cease(number, known, connection)
        finally:
            if known:
                ceased.set()

    monkeypatch.setattr(dispatcher, "heartbeats", heartbeats)
    monkeypatch.setenv(client.KEY, "the key")
    server = DriverServer()
    for name, value in {
        WORKER: "1007",
        client.ADDRESS: client.LOOPBACK,
        client.PORT: str(server.start(handler(dispatcher, server))),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }.items():
        monkeypatch.setenv(name, value)
    try:
        with subprocess.Popen([sys.executable, "-c", HOLDS_LOCK, heartbeat.__file__]) as worker:
            wait_for("heartbeats", lambda: received.call_count >= 4)
            received.assert_called_with(1007)
            (sender,) = psutil.Process(worker.pid).children()
            for number in (signal.SIGTERM, signal.SIGINT):  # they are for the worker
                sender.send_signal(number)
            worker.send_signal(signal.SIGSTOP)
            assert ceased.wait(60)
            before = received.call_count
            worker.send_signal(signal.SIGCONT)
            wait_for("more heartbeats", lambda: received.call_count >= before + 2)
            worker.kill()
            psutil.wait_procs([sender], timeout=60)
            assert not sender.is_running()
    finally:
        server.stop()

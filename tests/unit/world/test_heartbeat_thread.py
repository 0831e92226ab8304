"""The thread in which a worker's heart beats: when it begins, what it holds, and how long it waits between beats."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping

import pytest

from hvd_train.launch import client
from hvd_train.launch.launcher import WORKER
from hvd_train.world.heartbeat import Heartbeat


def test_the_heart_beats_in_a_thread_that_keeps_no_process_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start, by the environment of then: Horovod's core changes it, and the driver stays where it is."""
    seen: list[tuple[bool, str, Mapping[str, str]]] = []
    changed, done = threading.Event(), threading.Event()

    def live(beat: Heartbeat, environ: Mapping[str, str]) -> None:
        changed.wait(20)
        thread = threading.current_thread()
        seen.append((thread.daemon, thread.name, environ))
        done.set()

    monkeypatch.setattr(Heartbeat, "_live", live)
    environment = {WORKER: "1007"}
    Heartbeat(environment)
    environment[WORKER] = "1008"
    changed.set()
    assert done.wait(20)
    assert seen == [(True, "heartbeat", {WORKER: "1007"})]


def test_the_lifeline_lasts_as_long_as_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end says that the process has ended, and to the driver that means another worker in its slot."""
    theirs, ours = socket.socketpair()
    lines = [ours]
    del ours
    asked: list[tuple[Mapping[str, str], str, float]] = []
    monkeypatch.setattr(client, "hold", lambda *arguments: asked.append(arguments) or lines.pop())
    beats: list[Mapping[str, str]] = []
    beat = Heartbeat({})
    monkeypatch.setattr(beat, "_beat", beats.append)
    environment = {WORKER: "1007"}
    beat._live(environment)
    assert (asked, beats) == ([(environment, "lifeline/1007", 2.0)], [environment])
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    theirs.close()


def test_the_heart_beats_without_a_lifeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is out of reach at that moment hears the next beat."""

    def out_of_reach(*arguments: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(client, "hold", out_of_reach)
    beats: list[Mapping[str, str]] = []
    beat = Heartbeat({})
    monkeypatch.setattr(beat, "_beat", beats.append)
    beat._live({WORKER: "1007"})
    assert beats == [{WORKER: "1007"}]


class Wake(threading.Event):
    """An event whose time is over at once; notes how long each wait would have been, and whether it was woken."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[float | None, bool]] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Note the wait, and wait for nothing."""
        self.waits.append((timeout, self.is_set()))
        return self.is_set()


def test_a_signal_is_told_at_once_and_then_the_heart_beats_as_before() -> None:
    """The beat after a signal does not wait for its second; all others do, or the driver would drown in them."""
    beat = Heartbeat({})
    beat._has_driver, beat._wake = True, Wake()
    beat._pause()
    beat.told_to_end()
    beat._pause()
    beat.told_to_end()
    beat._pause()
    assert beat._wake.waits == [(1.0, False), (1.0, True), (1.0, False)]

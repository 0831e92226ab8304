"""Reports and requests of an elastic worker to its driver."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import client
from hvd_train.launch.launcher import WORKER
from hvd_train.world import elastic_world
from hvd_train.world.elastic_world import Heartbeat

NOTHING: Mapping[int, Any] = MappingProxyType({})


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Return the answers of a driver, each used once, and the requests to it."""
    answers, asked = list[str](), list[str]()

    def ask(environ: Mapping[str, str], path: str, *rest: object) -> str:
        asked.append(path)
        return answers.pop(0)

    monkeypatch.setattr(client, "get", ask)
    monkeypatch.setattr(client, "put", lambda environ, path, text, *rest: asked.append(f"{path} {text}"))
    return answers, asked


def test_a_worker_reports_its_facts_and_gets_its_first_rank(driver: tuple[list[str], list[str]]) -> None:
    answers, asked = driver
    worker = {"HOROVOD_HOSTNAME": "h2", WORKER: "1007"}
    answers += ["", "2,3,0,1,2,3"]
    environment = dict(worker)
    elastic_world.wait_for_first_rank(environment, {"torch": "2.15"})
    assert asked == ['facts/1007 {"who": "h2", "torch": "2.15"}', "problem/1007", "rank_and_size/h2:1007"]
    assert [environment[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK")] == ["2", "3", "0"]
    environment = dict(worker)
    answers += ["h2 differs from the job in torch", "", "-1,3,-1,1,-1,3"]
    with pytest.raises(UsageError, match="h2 differs from the job in torch"):
        elastic_world.wait_for_first_rank(environment, {"torch": "2.14"})
    with pytest.raises(SystemExit, match="0"):  # the job continues without it
        elastic_world.wait_for_first_rank(environment, {})


def requested_after(
    answers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    before: Mapping[int, Callable[[Heartbeat], object]] = NOTHING,
    pauses: Mapping[int, float] = NOTHING,
) -> list[str]:
    """Return the request after each heartbeat, one a second; the driver gives these answers ("": none).

    `before` holds events before heartbeats by number (from 1), and `pauses` how long the process pauses there, in s.
    """
    beat, found, now = Heartbeat(), list[str](), [1000.0]

    def get(environ: dict[str, str], path: str, timeout_s: float) -> str:
        assert 0 < timeout_s <= 2, "a silent driver must not block the heartbeat"
        if not answers[0]:
            raise OSError("no answer")
        return answers[0]

    def pause() -> None:
        found.append(beat.requested)
        now[0] += 1.0 + pauses.get(len(found), 0.0)
        before.get(len(found), lambda _: None)(beat)
        answers.pop(0)
        if not answers:
            raise StopIteration

    monkeypatch.setattr(client, "get", get)
    monkeypatch.setattr(elastic_world, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(beat, "_pause", pause)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with suppress(StopIteration):
        beat._beat({WORKER: "1007"})
        raise AssertionError("the heartbeat has ended by itself")
    return found


def test_the_last_answer_is_what_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may withdraw a change, but not a stop."""
    answers = ["train", "change", "train", "stop", "train"]
    assert requested_after(answers, monkeypatch) == ["train", "change", "train", "stop", "stop"]
    assert requested_after(["train"] * 60, monkeypatch) == ["train"] * 60


def test_a_worker_without_a_driver_stops_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It commits after 10 s of silence, and ends within the next 30 s."""
    assert requested_after(["train", *[""] * 9, "train"], monkeypatch) == ["train"] * 11
    assert requested_after([""] * 41, monkeypatch) == [*["train"] * 11, *["stop"] * 30]
    with pytest.raises(SystemExit, match=r"^1$"):
        requested_after([""] * 42, monkeypatch)


def test_a_worker_that_was_paused_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may resume later than the worker."""
    answers = [*["train"] * 3, *[""] * 8, *["train"] * 3]
    assert requested_after(answers, monkeypatch, pauses={3: 300.0, 12: 20.0}) == ["train"] * 14
    assert requested_after([*["train"] * 3, *[""] * 30], monkeypatch, pauses={3: 20.0})[-1] == "stop"
    with pytest.raises(SystemExit, match=r"^1$"):
        requested_after(["train", *[""] * 60], monkeypatch, pauses={1: 20.0})


def test_an_evicted_worker_leaves_its_world_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may commit, but must not stop the others; an earlier stop of all still holds."""
    assert requested_after(["train", "end", "train"], monkeypatch) == ["train", "change", "change"]
    assert requested_after(["stop", "end"], monkeypatch) == ["stop", "stop"]
    assert len(requested_after([*[""] * 35, *["end"] * 40], monkeypatch)) == 75
    with pytest.raises(SystemExit):
        requested_after(["end"] * 50, monkeypatch)


def test_a_worker_may_finish_its_last_commit_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large state takes minutes."""
    left = {5: Heartbeat.training_left}
    assert len(requested_after([""] * 500, monkeypatch, left)) == 500
    with pytest.raises(SystemExit):
        requested_after([""] * 700, monkeypatch, left)


def test_the_driver_decides_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker leaves, or all stop; if no driver answers, all stop after 3 s."""
    signal = {1: Heartbeat.signal_received}
    assert requested_after(["train", "change", "stop"], monkeypatch, signal) == ["train", "change", "stop"]
    assert requested_after(["train", *[""] * 5], monkeypatch, signal) == [*["train"] * 4, "stop", "stop"]

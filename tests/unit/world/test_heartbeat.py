"""What a worker of an elastic job tells our driver and asks it for."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import client
from hvd_train.launch.launcher import WORKER
from hvd_train.world import heartbeat


@pytest.fixture
def driver() -> Iterator[tuple[dict[str, str], list[str]]]:
    """The environment of a worker whose driver answers from a list; what was asked stands there afterwards."""
    talk: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server calls
            self.send_response(200)
            self.end_headers()
            self.wfile.write(talk.pop(0).encode())
            talk.append(self.path)

        def do_PUT(self) -> None:
            self.path += f" {self.rfile.read(int(self.headers['Content-Length'])).decode()}"
            self.do_GET()

        def log_message(self, *arguments: object) -> None:
            """Not on the test's output."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        environment = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_HOSTNAME": "h2", WORKER: "1007"}
        environment["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(server.server_port)
        yield environment, talk
        server.shutdown()


def test_a_rank_is_asked_for_by_the_workers_number(driver: tuple[dict[str, str], list[str]]) -> None:
    """When it has said what it runs; its rank stands where Horovod's core looks for it."""
    environment, talk = driver
    talk += ["", "", "2,3,0,1,2,3"]
    heartbeat.wait_for_first_rank(environment, {"torch": "2.15"})
    assert talk == ['/facts/1007 {"host": "h2", "torch": "2.15"}', "/problem/1007", "/rank_and_size/h2:1007"]
    assert (environment["HOROVOD_RANK"], environment["HOROVOD_SIZE"], environment["HOROVOD_LOCAL_RANK"]) == (
        "2",
        "3",
        "0",
    )


def test_one_that_is_not_like_the_job_does_not_ask_for_a_rank(driver: tuple[dict[str, str], list[str]]) -> None:
    """The user reads why."""
    environment, talk = driver
    talk += ["", "h2 differs from the job in torch"]
    with pytest.raises(UsageError, match="h2 differs from the job in torch"):
        heartbeat.wait_for_first_rank(environment, {"torch": "2.14"})
    assert "HOROVOD_RANK" not in environment


def test_one_that_was_given_up_leaves_in_peace(driver: tuple[dict[str, str], list[str]]) -> None:
    """It must not ask in the name of its successor, which has its host and its local rank."""
    environment, talk = driver
    talk.append("end")
    with pytest.raises(SystemExit) as left:
        heartbeat.announce_rejoining(environment)
    assert left.value.code == 0
    assert talk == ["/may_ask/1007"]
    talk[:] = ["ask"]
    heartbeat.announce_rejoining(environment)
    talk[:] = ["", "", "-1,-1,-1,-1,-1,-1"]
    with pytest.raises(SystemExit):
        heartbeat.wait_for_first_rank(environment, {})


def test_without_our_driver_nobody_is_asked() -> None:
    """Horovod's own has given a rank already."""
    environment = {"HOROVOD_ELASTIC": "1", "HOROVOD_RANK": "1"}
    heartbeat.wait_for_first_rank(environment, {})
    heartbeat.announce_rejoining(environment)
    assert environment["HOROVOD_RANK"] == "1"


class Exited(Exception):
    """Takes the place of the end of the process."""


def requested_after(answers: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is requested after each beat, one second apart, to which our driver answers ("": it does not)."""
    beat, found, now = heartbeat.Heartbeat({}), [], [0.0]

    def get(environ: dict[str, str], path: str, timeout_s: float) -> str:
        assert path == "heartbeat/1007"
        if not answers[0]:
            raise OSError("no answer")
        return answers[0]

    def sleep(seconds: float) -> None:
        found.append(beat.requested)
        now[0] += seconds
        answers.pop(0)
        if not answers:
            raise StopIteration

    def end(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(client, "get", get)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(os, "_exit", end)
    try:
        beat._beat({WORKER: "1007"})
    except StopIteration:
        return found
    raise AssertionError("a heartbeat goes on")


def test_the_last_answer_is_what_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change may be taken back; a stop may not."""
    answers = ["train", "change", "train", "stop", "train"]
    assert requested_after(answers, monkeypatch) == ["train", "change", "train", "stop", "stop"]


def test_a_worker_without_a_driver_stops_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short silence changes nothing; after 10 s the worker commits, and 30 s later it must be gone."""
    assert requested_after(["train", *[""] * 9, "train"], monkeypatch) == ["train"] * 11
    assert requested_after([""] * 14, monkeypatch)[-4:] == ["train", "stop", "stop", "stop"]
    with pytest.raises(Exited):
        requested_after([""] * 60, monkeypatch)


def test_a_worker_that_was_given_up_ends_at_the_next_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot is another process's by now."""
    with pytest.raises(Exited):
        requested_after(["train", "end"], monkeypatch)


def test_a_change_that_has_happened_is_not_requested_again() -> None:
    """The newcomer itself is the change that it has heard of; a wish to stop outlives the meeting."""
    beat = heartbeat.Heartbeat({})
    beat.requested = "change"
    beat.world_formed()
    assert beat.requested == "train"
    beat.requested = "stop"
    beat.world_formed()
    assert beat.requested == "stop"

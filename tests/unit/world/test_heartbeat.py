"""What a worker of an elastic job tells our driver and asks it for."""

from __future__ import annotations

import http.server
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import client
from hvd_train.launch.launcher import WORKER
from hvd_train.world import heartbeat
from hvd_train.world.heartbeat import Heartbeat
from hvd_train.world.world import DriverLost


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


def test_the_way_to_the_others_is_asked_for(
    driver: tuple[dict[str, str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the ranks meet, since other hosts come later; Horovod's own driver is not asked."""
    environment, talk = driver
    found: list[str] = []
    limits: list[float | None] = []

    def choose(environ: Mapping[str, str], elsewhere: str) -> None:
        assert environ is environment
        found.append(elsewhere)

    def get(environ: Mapping[str, str], path: str, timeout_s: float | None = None, real: Any = client.get) -> str:
        limits.append(timeout_s)
        return str(real(environ, path, timeout_s))

    monkeypatch.setattr(heartbeat.addresses, "choose_interface", choose)
    monkeypatch.setattr(client, "get", get)
    talk += ["", "10.1.0.7"]
    heartbeat.choose_interface(environment)
    heartbeat.choose_interface(environment)
    heartbeat.choose_interface({})
    assert (found, talk) == (["", "10.1.0.7"], ["/elsewhere/1007"] * 2)
    assert all(limit is not None and 0 < limit <= 2 for limit in limits), "the ranks that meet wait for this one"


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
        heartbeat.announce_rejoining(environment, time.monotonic())
    assert left.value.code == 0
    assert talk == ["/may_ask/1007"]
    talk[:] = ["ask"]
    assert heartbeat.announce_rejoining(environment, time.monotonic())
    talk[:] = ["", "ask"]
    assert heartbeat.announce_rejoining(environment, time.monotonic(), "connection refused")
    assert talk == ["/not_met/1007 connection refused", "/may_ask/1007"]
    talk[:] = ["", "", "-1,3,-1,1,-1,3"]
    with pytest.raises(SystemExit) as left:
        heartbeat.wait_for_first_rank(environment, {})
    assert left.value.code == 0
    assert "HOROVOD_RANK" not in environment


def test_an_answer_that_was_cut_short_is_no_rank(driver: tuple[dict[str, str], list[str]]) -> None:
    """Half a place would be mixed with what Horovod takes for the rest; the worker asks again where it meets others."""
    environment, talk = driver
    talk += ["", "", "2,3,0"]
    with pytest.raises(ValueError, match="zip"):
        heartbeat.wait_for_first_rank(environment, {})
    assert "HOROVOD_RANK" not in environment


def test_without_our_driver_nobody_is_asked() -> None:
    """Horovod's own has given a rank already."""
    environment = {"HOROVOD_ELASTIC": "1", "HOROVOD_RANK": "1"}
    heartbeat.wait_for_first_rank(environment, {})
    assert not heartbeat.announce_rejoining(environment, time.monotonic())
    assert environment["HOROVOD_RANK"] == "1"


class Exited(Exception):
    """Takes the place of the end of the process."""


def requested_after(
    answers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    before: Mapping[int, Callable[[Heartbeat], object]] | None = None,
    scopes: list[str] | None = None,
) -> list[str]:
    """What is requested after each beat, one second apart, to which our driver answers ("": it does not).

    `before`: what happens before the beats of these numbers (from 1). What was asked for is appended to `scopes`.
    """
    beat, found, now = heartbeat.Heartbeat({}), list[str](), [1000.0]
    beat._has_driver = True

    def get(environ: dict[str, str], path: str, timeout_s: float) -> str:
        scope, _, number = path.partition("/")
        assert number == "1007"
        assert 0 < timeout_s <= 2, "a driver that takes a beat and does not answer would hold the heart for ever"
        if scopes is not None:
            scopes.append(scope)
        if not answers[0]:
            raise OSError("no answer")
        return answers[0]

    def pause() -> None:
        found.append(beat.requested)
        now[0] += 1.0
        if (happens := (before or {}).get(len(found))) is not None:
            happens(beat)
        answers.pop(0)
        if not answers:
            raise StopIteration

    def end(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(client, "get", get)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(beat, "_pause", pause)
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
    assert requested_after([""] * 41, monkeypatch) == [*["train"] * 11, *["stop"] * 30]
    with pytest.raises(Exited, match=r"^1$"):
        requested_after([""] * 42, monkeypatch)


def test_a_worker_whose_driver_answers_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer counts, not only the first: a training of days is not a silence of days."""
    assert requested_after(["train"] * 60, monkeypatch) == ["train"] * 60


def test_a_worker_that_was_given_up_leaves_its_world_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold steps that nobody else has, so it may commit; but its wish to end must not end the others.

    A stop of all that was requested before holds on. One that hangs ends after 40 s.
    """
    assert requested_after(["train", "end", "train"], monkeypatch) == ["train", "change", "change"]
    assert requested_after(["stop", "end"], monkeypatch) == ["stop", "stop"]
    assert len(requested_after([*[""] * 35, *["end"] * 40], monkeypatch)) == 75
    with pytest.raises(Exited):
        requested_after(["end"] * 50, monkeypatch)


def test_a_worker_that_writes_its_last_commit_is_not_ended_by_a_silent_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large state takes minutes; then the process has half a minute to end."""
    left = {5: Heartbeat.training_left}
    assert len(requested_after([""] * 500, monkeypatch, left)) == 500
    with pytest.raises(Exited):
        requested_after([""] * 700, monkeypatch, left)
    assert len(requested_after([""] * 630, monkeypatch, {35: Heartbeat.training_left})) == 630
    written = {**left, 200: Heartbeat.all_written}
    assert len(requested_after([""] * 231, monkeypatch, written)) == 231
    with pytest.raises(Exited):
        requested_after([""] * 232, monkeypatch, written)


def test_a_signal_is_told_to_the_driver_which_says_what_comes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker leaves, or all stop; where no driver answers, all stop, soon: it may have been killed as well."""
    told, scopes = {1: Heartbeat.told_to_end}, list[str]()
    assert requested_after(["train", "change", "stop"], monkeypatch, told, scopes) == ["train", "change", "stop"]
    assert scopes == ["heartbeat", "leaving", "leaving"]
    assert requested_after(["train", *[""] * 5], monkeypatch, told) == [*["train"] * 4, "stop", "stop"]
    without_driver = heartbeat.Heartbeat({})
    without_driver.told_to_end()
    assert without_driver.requested == "stop"


@pytest.mark.parametrize("answer", [b"train", b"<html>", b"\xff\xfe", b"", None])
def test_a_garbled_answer_is_no_answer(answer: bytes | None, driver: tuple[dict[str, str], list[str]]) -> None:
    """Something else may listen at the driver's port, or cut its answer short: the heart beats on."""
    environment = driver[0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(server.getsockname()[1])

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                head = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % (99 if answer == b"" else len(answer or b""))
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" if answer is None else head + answer)

        threading.Thread(target=serve, daemon=True).start()
        assert heartbeat._answer(environment, "heartbeat") == ("train" if answer == b"train" else None)


def test_a_driver_out_of_reach_is_asked_again_before_a_worker_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node whose network is away for seconds must not cost the workers that meet just then.

    Each question has a limit, and a pause after it: a driver that comes back would otherwise meet a flood of them.
    """
    failures, now, limits = [11], [1000.0], list[float | None]()

    def ask(environ: dict[str, str], path: str, *rest: Any) -> str:
        limits.append(rest[-1] if rest and not isinstance(rest[-1], str) else None)
        assert len(limits) < 50, "there is no pause between two questions"
        failures[0] -= 1
        if failures[0] >= 0:
            raise OSError("no route to host")
        return "ask"

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(client, "get", ask)
    monkeypatch.setattr(client, "put", ask)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    assert heartbeat.announce_rejoining({WORKER: "1007"}, now[0], "connection refused")
    assert now[0] == 1000.0 + heartbeat.GONE_S + 1, "the last question is one that is asked after ten seconds"
    assert len(limits) == 11 + 2
    failures[0] = 100
    begun = now[0]
    with pytest.raises(DriverLost, match=r"the driver has not answered for 10 s \(no route to host\)"):
        heartbeat.announce_rejoining({WORKER: "1007"}, begun - 8)
    assert now[0] == begun + heartbeat.GONE_S - 8 + 1, "it has been silent for eight seconds already"
    assert all(limit is not None and 0 < limit <= 2 for limit in limits)


def test_a_change_that_has_happened_is_not_requested_again() -> None:
    """The newcomer itself is the change that it has heard of; a wish to stop outlives the meeting."""
    beat = heartbeat.Heartbeat({})
    beat.requested = "change"
    beat.world_formed()
    assert beat.requested == "train"
    beat.requested = "stop"
    beat.world_formed()
    assert beat.requested == "stop"


def test_a_worker_that_was_given_up_has_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves by its driver's word, and is not to take itself for one that was left alone."""
    now = [1000.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for answer, gone in ((None, True), ("end", False)):
        beat, begun = Heartbeat({}), now[0]
        beat._has_driver = True
        beat._hear(answer)
        now[0] += heartbeat.GONE_S + 1
        assert beat.driver_gone is gone
        assert beat.silent_since == (begun if gone else now[0])

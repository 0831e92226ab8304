"""A service in a thread of its own, played by trackers that are slow, hang or fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hvd_train.run_files import in_background
from hvd_train.run_files.destination import Tracker
from hvd_train.run_files.in_background import InBackground
from hvd_train.run_files.records import Ending, Numbers

METRICS = Path("metrics.jsonl")


class Played(Tracker):
    """Keeps what it is given; each of its methods blocks as long as `gates` has an event for it that is not set."""

    def __init__(self, **gates: threading.Event) -> None:
        self.gates, self.taken, self.endings, self.abandoned = gates, list[Numbers](), list[Ending | None](), False
        self.failures: list[Exception] = []

    def _enter(self, name: str) -> None:
        if name in self.gates:
            self.gates[name].wait()
        if self.failures:
            raise self.failures.pop(0)

    def open(self) -> str:
        """Begin."""
        self._enter("open")
        return "at http://me:secret@host/"

    def is_new(self, numbers: Numbers) -> bool:
        """Say no to a step that was taken."""
        return numbers.kind == "end" or not self.taken or numbers.step > self.taken[-1].step

    def add(self, several: Sequence[Numbers]) -> None:
        """Keep numbers."""
        self._enter("add")
        self.taken += several

    def close(self, ending: Ending | None) -> None:
        """Keep the ending."""
        self._enter("close")
        self.endings.append(ending)

    def abandon(self) -> None:
        """Remember that."""
        self.abandoned = True


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Return what holds a method up until the test is over."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_AT_END_S", 0.3), ("_SOON_S", 0.1)):
        monkeypatch.setattr(in_background, name, seconds)


def numbers(step: int) -> Numbers:
    """Return numbers of a step."""
    return Numbers("step", step, 1, 1e9, {"train/loss": 0.5})


def test_all_numbers_arrive_in_their_order() -> None:
    """Then those of the whole run, and how it has ended; the line about where it is shows no password."""
    tracker, said = Played(), list[str]()
    service = InBackground("wandb", tracker, METRICS, said.append)
    for step in range(1, 2001):
        service.add(numbers(step))
    ending = Ending("finished", {"best/top1": 0.5})
    service.close(ending)
    assert [one.step for one in tracker.taken[:2000]] == list(range(1, 2001))
    assert [one.values for one in tracker.taken[2000:]] == [{"best/top1": 0.5}]
    assert tracker.endings == [ending]
    assert said == ["at http://***@host/"]


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("method", ["open", "add", "close"])
def test_a_service_that_hangs_costs_nothing_but_the_limit_at_the_end(method: str, gate: threading.Event) -> None:
    """No call of the training waits for it; the end says how long it waits and what is missing, each in one line."""
    tracker, said = Played(**{method: gate}), list[str]()
    service = InBackground("wandb", tracker, METRICS, said.append, most=1000 if method == "close" else 100)
    begin = time.monotonic()
    for step in range(1, 1001):
        service.add(numbers(step))
    assert time.monotonic() - begin < 5
    service.close(Ending("finished"))
    assert time.monotonic() - begin < 10
    assert tracker.abandoned
    assert "waiting 0 s at most for wandb to take the last numbers" in said
    if method == "close":
        assert said[-1] == "wandb did not confirm that it has the end of the run"
    else:
        assert said.count("numbers are lost for wandb: it does not keep up, or does not answer; training goes on") == 1
        assert said[-1] == "wandb lacks 1000 records, which metrics.jsonl has"
    assert len(said) <= 4


def test_numbers_that_a_service_refuses_are_counted() -> None:
    """One line when it begins, without the password in the error, and one with the number at the end."""
    tracker, said = Played(), list[str]()
    service = InBackground("mlflow", tracker, METRICS, said.append)
    _wait_until(lambda: not service._waiting and service._in_hand == 0)
    for step in (1, 2):
        tracker.failures.append(OSError("PUT http://me:secret@host/: 500"))
        service.add(numbers(step))
        _wait_until(lambda: not tracker.failures)
        _wait_until(lambda: service._in_hand == 0)
    service.add(numbers(3))
    service.close(None)
    assert [one.step for one in tracker.taken] == [3]
    assert said == [
        "at http://***@host/",
        "numbers are lost for mlflow: PUT http://***@host/: 500; training goes on",
        "mlflow lacks 2 records, which metrics.jsonl has",
    ]


def test_a_service_that_is_down_at_first_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost where it comes back before too much waits; one line says that it was away."""
    monkeypatch.setattr(in_background, "_AGAIN_S", 0.01)
    tracker, said = Played(), list[str]()
    tracker.failures = [ConnectionError("refused"), ConnectionError("refused")]
    service = InBackground("mlflow", tracker, METRICS, said.append)
    _wait_until(lambda: not tracker.failures)
    service.add(numbers(1))
    _wait_until(lambda: tracker.taken)
    service.close(None)
    assert [line for line in said if "refused" in line] == ["cannot reach mlflow, and tries again: refused"]


def test_what_the_service_lacks_of_the_file_comes_first() -> None:
    """A process that was killed had not sent it, and a step comes once, wherever it stands."""
    line = {"kind": "step", "epoch": 1, "time": 1.0, "loss": 0.5}
    METRICS.write_text("".join(json.dumps({**line, "step": step}) + "\n" for step in (1, 2, 3)))
    tracker = Played()
    tracker.taken.append(numbers(1))
    service = InBackground("wandb", tracker, METRICS, [].append)
    service.add(numbers(3))
    service.add(numbers(4))
    service.close(None)
    assert [one.step for one in tracker.taken] == [1, 2, 3, 4]


def test_a_process_whose_folder_was_taken_over_sends_nothing() -> None:
    """Not even how the run has ended: for the one that has taken over it goes on."""
    tracker, said, held = Played(), list[str](), True
    service = InBackground("wandb", tracker, METRICS, said.append, lambda: held)
    service.add(numbers(1))
    _wait_until(lambda: tracker.taken)
    held = False
    service.add(numbers(2))
    service.close(Ending("stopped"))
    assert [one.step for one in tracker.taken] == [1]
    assert tracker.endings == []


def _wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)

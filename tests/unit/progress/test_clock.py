"""Where the time of a step goes, how fast a training is, and when a time has come."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from torch import nn

from hvd_train.progress.clock import PHASES, Lap, Split, Stopwatch, Timer, duration
from hvd_train.world.world import LocalWorld
from tests.support.runs import convnet, small_config, trained


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_a_lap_ends_where_the_next_one_begins() -> None:
    """Looking ends none, so that no time is counted twice and none is lost."""
    clock = Clock()
    lap = Lap(clock)
    clock.time += 2.0
    assert (lap.look(), lap.take(), lap.look()) == (2.0, 2.0, 0.0)
    clock.time += 1.0
    assert lap.take() == 1.0


def test_each_phase_has_its_mean_seconds_per_step() -> None:
    """What is marked several times in a step adds up; evaluations count nowhere; each asking begins anew."""
    clock = Clock()
    split = Split(clock)
    assert split.take() is None
    for wait in (1.0, 3.0):
        for phase, seconds in (
            ("data", wait),
            ("forward", 2.0),
            ("backward", 4.0),
            ("forward", 2.0),
            ("optimizer", 1.0),
        ):
            clock.time += seconds
            split.mark(phase)
        clock.time += 1000
        split.restart()
    assert split.take() == {
        **dict.fromkeys(PHASES, 0.0),
        "data": 2.0,
        "forward": 4.0,
        "backward": 4.0,
        "optimizer": 1.0,
    }
    assert split.take() is None


def test_a_long_way_between_lines_keeps_nothing_but_sums() -> None:
    """Marks do not pile up where metrics are written every million steps."""
    clock = Clock()
    split = Split(clock)
    for _ in range(10_000):
        clock.time += 0.5
        split.mark("optimizer")
    assert len(split._marks) < 1000
    assert split.take() == {**dict.fromkeys(PHASES, 0.0), "optimizer": 0.5}


def test_the_wait_for_samples_that_end_an_epoch_is_no_step() -> None:
    """Samples are asked for before the first step, beside each one, and so once more than there are steps."""
    clock = Clock()
    split = Split(clock)
    for phase in ("data", "forward", "data", "optimizer", "forward", "data", "optimizer"):
        clock.time += 3.0
        split.mark(phase)
    assert split.take() == {**dict.fromkeys(PHASES, 0.0), "data": 4.5, "forward": 3.0, "optimizer": 3.0}


def slow_forward(num_classes: int) -> nn.Module:
    """A model that takes its time, in the forward pass of training alone."""
    model = convnet(num_classes)
    model.register_forward_hook(lambda *_: time.sleep(0.02) if model.training else None)
    return model


def test_a_run_writes_down_where_its_time_went() -> None:
    """Each line of a step has the seconds of each phase."""
    trained(LocalWorld(), small_config(epochs=1, log_steps=2), slow_forward)
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    splits = [line["split"] for line in lines if line["kind"] == "step"]
    assert len(splits) > 1
    for split in splits:
        assert split["forward"] > 0.02
        assert set(split) == set(PHASES)
        assert all(split[phase] > 0 for phase in ("data", "backward", "optimizer"))


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


def test_a_time_limit_goes_on_from_what_is_used_up() -> None:
    """A worker that starts late in a job has the rest of the job's time."""
    clock = Clock()
    timer = Timer(5, clock, passed=3)
    clock.time += 1.9
    assert not timer.due
    clock.time += 0.1
    assert timer.due


def test_speed_leaves_out_the_time_before_a_restart() -> None:
    """As that in which ranks meet anew."""
    clock = Clock()
    watch = Stopwatch(clock)
    for _ in range(5):
        watch.step(10)
    clock.time += 1000
    watch.restart()
    clock.time += 2
    watch.step(10)
    assert watch.images_per_second == 10 / 2


def test_a_listener_hears_each_mark_and_each_restart() -> None:
    """By the phase, and by None for what was not training; a profile draws its phases from that."""
    split = Split(Clock())
    heard: list[str | None] = []
    split.mark("data")
    split.listener = heard.append
    split.mark("forward")
    split.restart()
    assert heard == ["forward", None]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (0.0123, "0.0123 s"),
        (59, "59 s"),
        (60, "1:00"),
        (3599.6, "1:00:00"),
        (3661, "1:01:01"),
        (7140, "1:59:00"),
    ],
)
def test_durations_are_written_as_people_do(seconds: float, text: str) -> None:
    """Seconds below a minute, then minutes, then hours."""
    assert duration(seconds) == text

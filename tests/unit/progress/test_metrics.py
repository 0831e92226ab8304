"""Sums of losses and hits, the time of each phase, the speed of a training, and timers."""

import math

import torch

from hvd_train.progress import metrics
from hvd_train.progress.clock import PHASES, RunningClock, Split, Stopwatch
from hvd_train.progress.metrics import Totals


def test_losses_and_the_first_five_answers_are_summed() -> None:
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1, 0]] * 7, dtype=torch.float64)
    targets = torch.tensor([0, 0, 0, 1, 4, 5, 6])
    sums = metrics.sums_of(torch.tensor(2.5, dtype=torch.float64), logits, targets)
    assert (sums.dtype, sums.tolist()) == (torch.float32, [2.5, 3, 1, 0, 0, 1])
    assert Totals.of(sums.tolist(), 7) == Totals(2.5, 3, 5, 7)
    top1, top5 = metrics.hits(logits, targets)
    assert (int(top1.sum()), int(top5.sum())) == (3, 5)
    total = Totals(1.0, 1, 2, 2) + Totals(8.0, 1, 1, 4)
    assert total.means() == {"loss": 1.5, "top1": 2 / 6, "top5": 3 / 6}
    assert all(math.isnan(value) for value in Totals().means().values())


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_each_phase_has_its_mean_seconds_per_step() -> None:
    """Marks of one phase in a step add up; evaluations do not count; each call starts from zero."""
    clock = Clock()
    split = Split(clock)
    assert split.take() is None
    for wait in (1.0, 3.0) * 500:
        seconds = (wait, 2.0, 4.0, 2.0, 1.0)
        for phase, passed in zip(("data", "forward", "backward", "forward", "optimizer"), seconds, strict=True):
            clock.time += passed
            split.mark(phase)
        clock.time += 1000
        split.restart()
    clock.time += 1000
    split.mark("data")  # the wait for samples that ends an epoch is no step
    whole = {"data": 3.0, "forward": 4.0, "backward": 4.0, "optimizer": 1.0}
    assert split.take() == {**dict.fromkeys(PHASES, 0.0), **whole}
    assert split.take() is None


def test_speed_counts_training_alone() -> None:
    """The first five steps, evaluations and rendezvous do not count."""
    clock = Clock()
    watch = Stopwatch(clock)

    def speed_after(seconds: float, samples: int = 10) -> float:
        clock.time += seconds
        watch.step(samples)
        return watch.images_per_second

    assert [speed_after(seconds) for seconds in (30, 1, 1, 1, 1)] == [0.0] * 5
    speed_after(2)
    assert speed_after(3) == 20 / 5
    clock.time += 1  # the loader's wait at the end of the epoch is training
    with watch.paused():
        clock.time += 1000
    assert speed_after(4, 30) == 50 / 10
    clock.time += 1000
    watch.restart()
    assert speed_after(2) == 60 / 12


def test_a_running_clock_leaves_pauses_out() -> None:
    """After a pause the clock waits until other processes of the job run again."""
    clock, pauses = Clock(), list[float]()
    running = RunningClock(2.0, clock, lambda seconds, at: pauses.append(seconds))
    begun = running()
    for pause in (20.0, 300.0, 1e6):
        before = running()
        clock.time += pause
        assert running() == before
        for _ in range(6):
            clock.time += 1.5
            assert running() == before, "the others wake up"
        for _ in range(100):
            clock.time += 1.5
            running()
        assert 145 <= running() - before <= 150
    assert pauses == [20.0, 300.0, 1e6]
    before = running()
    for _ in range(100):
        clock.time += 3.0
        running()
    assert running() - before > 50, "a slow process reaches its limits"
    assert begun == 100.0

"""Which ranks are called slow, for how long they must have been, and who is not."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from hvd_train.progress.clock import PHASES
from hvd_train.progress.slow_ranks import COLUMNS, Found, SlowRanks, Times, median_of_others, spread

STEPS = 10
QUIET = {"data": 0.002, "forward": 0.010, "backward": 0.020, "optimizer": 0.002, "other": 0.001}  # 35 ms
STEP_S = 0.1  # however long a rank works, the reduction ends for all at once


def row(samples: float = 16.0, queued: float = 0.0, **more: float) -> list[float]:
    """What a rank tells: the times of a quiet rank, with some of them longer."""
    phases = {phase: QUIET.get(phase, 0.0) + more.get(phase, 0.0) for phase in PHASES}
    phases["reduction"] = STEP_S - sum(phases.values())
    return [*phases.values(), queued, samples]


def times(*rows: list[float]) -> Times:
    """What all ranks tell in one step."""
    return np.array(rows)


def heard(slow_ranks: SlowRanks, told: Times, seconds: float) -> list[Found]:
    """Who is found while all ranks tell the same for so long."""
    return [one for _ in range(round(seconds / STEP_S / STEPS)) for one in slow_ranks.hear(told, STEPS)]


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"data": 0.03}, "input"),
        ({"forward": 0.03}, "compute"),
        ({"backward": 0.02, "forward": 0.01, "data": 0.015}, "compute"),
        ({"optimizer": 0.03}, "update"),
        ({"commit": 0.03}, "commit"),
        ({"other": 0.03}, "other"),
        ({"forward": 0.01, "backward": 0.02, "queued": 0.02}, "load"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_slow_rank_is_found_once_and_once_more_when_it_recovers(
    more: dict[str, float], cause: str, ranks: int
) -> None:
    """With what it is slow in and by what factor, however many ranks there are."""
    slow_ranks, quiet = SlowRanks(), times(*[row()] * ranks)
    slow = times(row(), row(**more), *[row()] * (ranks - 2))
    assert heard(slow_ranks, quiet, 30) == []
    (found,) = heard(slow_ranks, slow, 60)
    assert (found.rank, found.cause) == (1, cause)
    own = 0.035 + sum(value for name, value in more.items() if name != "queued")
    assert (found.seconds, found.of_others) == pytest.approx((own, 0.035))
    assert found.factor == pytest.approx(own / 0.035)
    (recovered,) = heard(slow_ranks, quiet, 60)
    assert (recovered.rank, recovered.cause, recovered.factor) == (1, None, pytest.approx(1))


def test_the_lines_name_rank_host_phase_and_factor() -> None:
    """One line when it becomes slow, one when it no longer is."""
    assert Found(1, "input", 0.0651, 0.035, 1.86).describe("h3") == (
        "rank 1 on h3 is slow in its input: its own work takes 65.1 ms of a step, 1.86 times the 35 ms of the others, "
        "which wait for it"
    )
    assert Found(1, None, 0.036, 0.035, 1.03).describe("h3") == (
        "rank 1 on h3 is no longer slow: its own work takes 36 ms of a step, that of the others 35 ms"
    )


def test_ten_seconds_pass_before_a_rank_is_called_slow() -> None:
    """And three logged steps, where these are far apart."""
    slow = times(row(), row(forward=0.03))
    assert heard(SlowRanks(), slow, 10) == []
    assert heard(SlowRanks(), slow, 13) != []
    far_apart = SlowRanks()
    assert [far_apart.hear(slow, 1000) != [] for _ in range(4)] == [False, False, True, False]


def test_a_rank_that_is_slow_now_and_then_is_not_called_so() -> None:
    """A burst of load ends before it is worth a line."""
    slow_ranks = SlowRanks()
    for _ in range(20):
        assert heard(slow_ranks, times(row(), row(forward=0.06)), 4) == []
        assert heard(slow_ranks, times(row(), row()), 9) == []


def test_what_takes_next_to_nothing_is_not_called_slow() -> None:
    """What a journal takes of tiny steps makes no rank slow, though it may be several times the rest."""
    slow_ranks = SlowRanks()
    tiny = times(*[[seconds] * len(PHASES) + [0.0, 16.0] for seconds in (1e-4, 5e-4)])
    assert [slow_ranks.hear(tiny, 10_000) for _ in range(20)] == [[]] * 20


def test_most_ranks_are_no_exception() -> None:
    """Nor are 20% more an alarm."""
    most = times(row(), *[row(forward=0.03)] * 3)
    for told in (most, times(row(), row(forward=0.007))):
        assert heard(SlowRanks(), told, 100) == []


def test_a_rank_near_the_bound_does_not_come_and_go() -> None:
    """Between the bound at which it is slow and the one at which it recovers, it stays what it is."""
    slow_ranks = SlowRanks()
    assert len(heard(slow_ranks, times(row(), row(forward=0.03)), 30)) == 1
    for _ in range(10):
        assert heard(slow_ranks, times(row(), row(forward=0.008)), 30) == []
        assert heard(slow_ranks, times(row(), row(forward=0.015)), 30) == []


def twice(told: list[float]) -> list[float]:
    """The same rank with two slots where it had one: it passes twice the samples, and updates the weights once."""
    by_samples = ("data", "forward", "backward", "samples")
    values = [2 * value if name in by_samples else value for name, value in zip(COLUMNS, told, strict=True)]
    values[PHASES.index("reduction")] = 0.01
    return values


def test_more_samples_are_no_slowness() -> None:
    """A rank with two slots takes longer than one with one; only where it does so for each sample it is slow."""
    assert heard(SlowRanks(), times(twice(row()), row(), row()), 100) == []
    (found,) = heard(SlowRanks(), times(twice(row(forward=0.03)), row(), row()), 100)
    assert (found.rank, found.cause) == (0, "compute")
    assert found.factor == pytest.approx(65 / 35, rel=0.1), "as if it had as many samples as the others"


def test_a_rank_for_which_nobody_waits_is_not_called_slow() -> None:
    """One that has few samples and is slow with them is still done before the others."""
    assert heard(SlowRanks(), times(twice(row()), twice(row()), row(forward=0.015)), 100) == []


@pytest.mark.parametrize("slow", [0, 2])
def test_ranks_that_have_nothing_to_tell_are_no_measure(slow: int) -> None:
    """A newcomer that is still given the state, and the first step of a world."""
    nothing = [0.0] * len(COLUMNS)
    waiting = [0.0 if name != "reduction" else STEP_S for name in COLUMNS]
    assert heard(SlowRanks(), times(nothing, nothing), 100) == []
    assert heard(SlowRanks(), times(row(), waiting), 100) == []
    rows = [row(), waiting, row()]
    rows[slow] = row(forward=0.03)
    assert [one.rank for one in heard(SlowRanks(), times(*rows), 100)] == [slow]


def test_a_slow_process_is_known_in_the_next_world() -> None:
    """By whatever number: it is not found twice, it recovers once, and one that has left is forgotten."""
    slow_ranks, slow, quiet = SlowRanks(), row(forward=0.03), row()
    slow_ranks.meet("abc")
    assert [one.rank for one in heard(slow_ranks, times(quiet, slow, quiet), 30)] == [1]
    slow_ranks.meet("bc")
    assert heard(slow_ranks, times(slow, quiet), 30) == []
    slow_ranks.meet("cb")
    assert [(one.rank, one.cause) for one in heard(slow_ranks, times(quiet, quiet), 30)] == [(1, None)]
    assert [one.rank for one in heard(slow_ranks, times(slow, quiet), 30)] == [0]
    slow_ranks.meet("db")
    assert heard(slow_ranks, times(quiet, quiet), 100) == []
    slow_ranks.meet("cb")
    assert [(one.rank, one.cause) for one in heard(slow_ranks, times(slow, quiet), 30)] == [(0, "compute")]


def test_processes_that_cannot_be_told_apart() -> None:
    """As of two containers of one name: their ranks are counted apart all the same."""
    slow_ranks = SlowRanks()
    slow_ranks.meet("aab")
    assert [one.rank for one in heard(slow_ranks, times(row(), row(forward=0.03), row()), 30)] == [1]


def test_a_stretch_does_not_outlive_its_world() -> None:
    """What was told by the ranks of one world is not added to what those of another one tell."""
    slow_ranks = SlowRanks()
    slow_ranks.hear(times(row(), row()), STEPS)
    slow_ranks.meet("abc")
    assert heard(slow_ranks, times(row(), row(), row()), 30) == []


def noisy(generator: np.random.Generator, ranks: int, spread_of: float) -> Iterable[Times]:
    """Logged steps of ranks on busy cores: each phase is as long as it is on its own, times a random number."""
    quiet = times(*[row()] * ranks)
    while True:
        told = quiet.copy()
        told[:, : len(PHASES)] *= generator.lognormal(0, spread_of, (ranks, 1)) * generator.lognormal(
            0, spread_of, (ranks, len(PHASES))
        )
        yield told


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("steps", [1, 10, 100])
def test_noise_is_no_slow_rank(ranks: int, steps: int) -> None:
    """Half an hour of steps of which each rank and phase has a random length: nobody is called slow."""
    slow_ranks, generator = SlowRanks(), np.random.default_rng(ranks)
    spread_of = {1: 0.3, 10: 0.2, 100: 0.1}[steps]  # means of more steps are steadier
    found: list[Found] = []
    for told, _ in zip(noisy(generator, ranks, spread_of), range(round(1800 / STEP_S / steps)), strict=False):
        found += slow_ranks.hear(told, steps)
    assert found == []


def test_in_noise_a_slow_rank_is_found() -> None:
    """Once in ten minutes of being slow, though some of its steps are shorter than those of the others."""
    slow_ranks, found = SlowRanks(), list[Found]()
    for told, _ in zip(noisy(np.random.default_rng(1), 3, 0.3), range(600), strict=False):
        told[2, PHASES.index("forward")] += 0.03
        found += slow_ranks.hear(told, STEPS)
    assert [(one.rank, one.cause) for one in found] == [(2, "compute")]


def test_the_median_of_the_others() -> None:
    """As Python's statistics have it."""
    for number in range(2, 8):
        values = np.random.default_rng(number).permutation(number) // 2 * 1.0
        expected = [statistics.median_high(np.delete(values, place)) for place in range(number)]
        assert median_of_others(values).tolist() == expected


def test_the_spread_over_ranks() -> None:
    """The least, the median of the others, and the most of each phase, with the rank that it is of."""
    found = spread(times(row(), row(forward=0.02), row(data=0.001)))
    assert found is not None
    assert found["work"] == [0.035, 0.036, 0.055, 1]
    assert found["forward"] == [0.01, 0.01, 0.03, 1]
    assert found["data"] == [0.002, 0.002, 0.003, 2]
    assert found["reduction"] == [0.045, 0.064, 0.065, 0]
    assert {*found} == {"work", *PHASES}
    assert spread(times(row(), [0.0] * len(COLUMNS))) is None


@pytest.mark.parametrize("find", [spread, lambda told: SlowRanks().hear(told, 1000)])
def test_a_thousand_ranks(find: Callable[[Times], Any]) -> None:
    """The record of a step is as short as that of three, and who is slow is found among them."""
    told = times(*[row()] * 1024)
    found = find(told)
    assert len(json.dumps(found)) < 700
    slow_ranks = SlowRanks()
    told[700, PHASES.index("forward")] += 0.03
    assert [one.rank for one in heard(slow_ranks, told, 30)] == [700]

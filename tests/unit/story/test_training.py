"""What elastic training guarantees whoever dies, with workers that are threads and faults that are data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_train.checkpoint import DiskStore
from hvd_train.launch import launcher
from hvd_train.run_files import ledger
from hvd_train.run_files.ledger import audit
from tests.support import runs
from tests.support.elastic import Event, Hosts, Kill, Unheard, UnheardSum, run_elastic
from tests.support.fault_plays import FOUR, ONE, STEPS, THREE, TOLERANCE, TWO, best_weights, check, play, undisturbed
from tests.support.runs import Weights, largest_difference, small_config, trained
from tests.support.worlds import StoppingWorld


@pytest.mark.parametrize(
    "events",
    [
        [Kill(7, rank=1)],
        [Kill(7, rank=0)],
        [Kill(1, rank=0)],
        [Kill(10, rank=2)],
        [Kill(11, rank=0), Kill(11, rank=1)],
        [Kill(3, rank=0), Kill(4, rank=0), Kill(5, rank=0)],
        [Kill(20, rank=0)],
    ],
    ids=str,
)
def test_deaths(events: list[Event]) -> None:
    """Whoever dies, and whenever: no finished step is lost, and the result is that of the undisturbed run."""
    job, folder = play(events, ONE, TWO, THREE)
    check(job, folder, undisturbed())
    assert job.sizes[:2] == [3, 2] or len(events) > 1


@pytest.mark.parametrize("events", [[Kill(7, 0), Hosts(12, (TWO, THREE, FOUR))], [Kill(1, 1), Unheard(11, 0)]])
def test_buffers_of_every_kind(events: list[Event]) -> None:
    """Survivors are as one in them, and newcomers get them: with spectral norm, random states, counters, no state_dict.

    Were survivors of the same step to differ in them, none could be trusted, and steps would be lost.
    """
    job, folder = play(events, ONE, TWO, THREE, make=runs.remembers)
    check(job, folder, undisturbed(runs.remembers))


@pytest.mark.parametrize("eval_epochs", [1, 2])
@pytest.mark.parametrize("step", [1, 7, 10, 20])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_a_step_behind(rank: int, step: int, eval_epochs: int) -> None:
    """A fault that it alone hears of: the step of the others counts, and rank 0 writes it down all the same."""
    job, folder = play([Unheard(step, rank)], ONE, TWO, THREE, eval_epochs=eval_epochs)
    check(job, folder, undisturbed())


@pytest.mark.parametrize("turn", [1, 2])
def test_rank_0_does_not_hear_of_an_evaluation(turn: int) -> None:
    """The others are in the next epoch: it writes down the epoch and the best weights that it has from them."""
    job, folder = play([UnheardSum("evaluation", 0, turn)], ONE, TWO)
    check(job, folder, undisturbed())
    assert largest_difference(*best_weights(folder)) <= TOLERANCE


def test_loader_processes_survive() -> None:
    """Images that loader processes read ahead for the broken step are not taken for those of the next one."""
    job, folder = play([Kill(7, rank=1)], ONE, TWO, data=runs.mapped_digits, workers=1)
    check(job, folder, undisturbed(data=runs.mapped_digits))


@pytest.mark.parametrize("make", [runs.batch_norm])
def test_running_statistics_survive(make: Any) -> None:
    """Batch norm's statistics, too, are those of the undisturbed run."""
    job, folder = play([Kill(7, rank=0), Hosts(12, (ONE, TWO, THREE))], ONE, TWO, make=make)
    check(job, folder, undisturbed(make))


def test_momentum_and_moments_survive() -> None:
    """The optimizer's state travels with the weights."""
    settings = {"optimizer": "adamw", "learning_rate": 0.003}
    job, folder = play([Kill(7, rank=0), Hosts(12, (ONE, TWO, THREE))], ONE, TWO, **settings)
    check(job, folder, undisturbed(**settings))


def test_all_die() -> None:
    """With no survivor the job goes on from the last commit, by itself."""
    job, folder = play([Kill(8, rank=0), Kill(8, rank=1)], ONE, TWO, commit_steps=5)
    assert audit(folder).faults == ()
    assert largest_difference(job.results[0][1], undisturbed()) <= TOLERANCE


def test_all_die_before_the_first_commit_of_a_run_that_began_with_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job goes on from that file, not from random weights."""
    monkeypatch.setenv(launcher.OWNER, "job")
    trained(StoppingWorld(5), small_config(epochs=2, output_dir=Path("first")))
    (file,) = Path("first/checkpoints").iterdir()
    settings = {"resume": str(file), "epochs": 2, "ledger": True, "output_dir": Path("second")}
    monkeypatch.setattr(DiskStore, "commit", lambda store, state: True)
    config = small_config(**settings)
    job = run_elastic(
        lambda world: trained(world, config), {"h1": 1, "h2": 1}, [Kill(3, rank=0), Kill(3, rank=1)], first=2
    )
    assert largest_difference(job.results[0][1], undisturbed()) <= TOLERANCE
    assert not Path("second.old").exists()


@pytest.mark.parametrize(
    "events",
    [
        [Kill(7, rank=0)],
        [Kill(10, rank=0), Kill(11, rank=0)],
        [Unheard(7, 0), Hosts(12, (ONE, TWO, THREE))],
        [Hosts(5, (TWO,))],
        [Kill(8, rank=0), Kill(8, rank=1)],
        [Kill(13, rank=0), Kill(13, rank=1)],
    ],
    ids=str,
)
def test_steps_that_share_a_line_of_the_ledger(events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in long epochs, where a line stands for many steps: whoever dies before it is written, none is missing."""
    monkeypatch.setattr(ledger, "_LINES_PER_EPOCH", 2)
    job, folder = play(events, ONE, TWO, commit_steps=3)
    check(job, folder, undisturbed())
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    assert len(lines) <= 4 + 2 * len(job.sizes)


EVENTS = st.one_of(
    st.builds(Kill, st.integers(1, STEPS), rank=st.integers(0, 2)),
    st.builds(
        Hosts, st.integers(1, STEPS), st.lists(st.sampled_from([ONE, TWO, THREE]), min_size=1, unique=True).map(tuple)
    ),
)


@settings(max_examples=15, deadline=None)
@given(events=st.lists(EVENTS, max_size=4))
def test_any_history(events: list[Event]) -> None:
    """Any sequence of deaths and host lists keeps the promises, as long as somebody survives each of them."""
    job, folder = play(events, ONE, TWO, THREE, commit_steps=1)
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, STEPS), report
    assert largest_difference(job.results[0][1], ANSWER.setdefault("weights", undisturbed())) <= TOLERANCE


ANSWER: dict[str, Weights] = {}

"""What elastic training guarantees through any fault and any list of hosts; workers are threads, faults are data."""

from __future__ import annotations

import functools
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_train.checkpoint import DiskStore
from hvd_train.elastic.worker import Stage
from hvd_train.launch import launcher
from hvd_train.run_files import ledger
from hvd_train.run_files.ledger import audit
from hvd_train.world.world import Request
from tests.support import runs
from tests.support.elastic import (
    ElasticThreadWorld,
    Event,
    Hosts,
    Kill,
    KillMeeting,
    Tell,
    Unheard,
    UnheardSum,
    run_elastic,
)
from tests.support.fault_plays import (
    ONE,
    STEPS,
    THREE,
    TOLERANCE,
    TWO,
    best_weights,
    check,
    events_of,
    play,
    undisturbed,
)
from tests.support.runs import largest_difference, small_config, trained
from tests.support.worlds import StoppingWorld

PLAIN = functools.cache(undisturbed)


class Complete(ElasticThreadWorld):
    """Takes no step while a listed slot has no member: no newcomer is too late."""

    def requested(self, *, told_to_end: bool = False) -> Request:
        end = time.monotonic() + 60
        with self._job.changed:
            while self._a_newcomer_is_due():
                assert time.monotonic() < end, f"no newcomer came: {self._job.roster}"
                self._job.changed.wait(0.1)
        return super().requested(told_to_end=told_to_end)

    def _a_newcomer_is_due(self) -> bool:
        roster = self._job.roster
        if roster.wants_change() or roster.wants_stop() or self._job.finish:
            return False
        slots = min(sum(roster.hosts.values()), roster.max_workers)
        whole = not roster.world_is_broken() and all(worker.stage is Stage.TRAINING for worker in roster.world)
        return whole and len(roster.world) < slots


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
    """If any rank dies in any step, no finished step is lost and the weights are the undisturbed ones."""
    job, folder = play(events, ONE, TWO, THREE)
    check(job, folder, PLAIN())
    assert job.sizes[:2] == [3, 2] or len(events) > 1


@pytest.mark.parametrize(
    ("events", "make", "changes"),
    [
        ([Kill(7, 0), Hosts(12, (TWO, THREE, ("h4", 1)))], runs.remembers, {}),
        ([Kill(1, 1), Unheard(11, 0)], runs.remembers, {}),
        ([Kill(7, 0), Hosts(12, (ONE, TWO))], runs.batch_norm, {}),
        ([Kill(7, 0), Hosts(12, (ONE, TWO))], runs.convnet, {"optimizer": "adamw", "learning_rate": 0.003}),
    ],
    ids=["all buffers", "all buffers, a step behind", "batch norm", "adamw"],
)
def test_survivors_and_newcomers_have_the_whole_state(events: list[Event], make: Any, changes: dict[str, Any]) -> None:
    """Running statistics, spectral norm, random states, counters, unsaved buffers, momentum and moments."""
    job, folder = play(events, ONE, TWO, THREE, make=make, kind=Complete, **changes)
    check(job, folder, undisturbed(make, **changes))


@pytest.mark.parametrize(
    ("rank", "step", "eval_epochs"), [(0, 1, 1), (0, 7, 1), (0, 10, 1), (0, 10, 2), (0, 20, 1), (1, 7, 1), (1, 10, 1)]
)
def test_a_rank_that_is_a_step_behind(rank: int, step: int, eval_epochs: int) -> None:
    """The step of the others counts, and rank 0 writes it down although it missed it."""
    job, folder = play([Unheard(step, rank)], ONE, TWO, THREE, eval_epochs=eval_epochs)
    check(job, folder, PLAIN())


@pytest.mark.parametrize("turn", [1, 2])
def test_rank_0_misses_an_evaluation(turn: int) -> None:
    """It writes the epoch's record and the best weights from the state of the others."""
    job, folder = play([UnheardSum("evaluation", 0, turn)], ONE, TWO)
    check(job, folder, undisturbed())
    assert largest_difference(*best_weights(folder)) <= TOLERANCE


def test_loader_processes_survive() -> None:
    """Images that were read ahead for the broken step are not mistaken for images of the next step."""
    job, folder = play([Kill(7, rank=1)], ONE, TWO, data=runs.mapped_digits, workers=1)
    check(job, folder, undisturbed(data=runs.mapped_digits))


def test_all_die() -> None:
    job, folder = play([Kill(8, rank=0), Kill(8, rank=1)], ONE, TWO, commit_steps=5)
    assert audit(folder).faults == ()
    assert largest_difference(job.results[0][1], PLAIN()) <= TOLERANCE


def test_all_die_before_the_first_commit_of_a_run_that_began_with_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launcher.OWNER, "job")
    trained(StoppingWorld(5), small_config(epochs=2, output_dir=Path("first")))
    (file,) = Path("first/checkpoints").iterdir()
    monkeypatch.setattr(DiskStore, "commit", lambda store, state: True)
    config = small_config(resume=str(file), epochs=2, ledger=True, output_dir=Path("second"))
    events = [Kill(3, rank=0), Kill(3, rank=1)]
    job = run_elastic(lambda world: trained(world, config), dict([ONE, TWO]), events, first=2)
    assert largest_difference(job.results[0][1], PLAIN()) <= TOLERANCE
    assert not Path("second.old").exists()


@pytest.mark.parametrize(
    "events",
    [
        [Kill(10, rank=0), Kill(11, rank=0)],
        [Unheard(7, 0), Hosts(12, (ONE, TWO, THREE))],
        [Kill(8, rank=0), Kill(8, rank=1)],
    ],
    ids=str,
)
def test_steps_that_share_a_line_of_the_ledger(events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """In long epochs a line stands for many steps; none is missing when rank 0 dies before the line is written."""
    monkeypatch.setattr(ledger, "_LINES_PER_EPOCH", 2)
    job, folder = play(events, ONE, TWO, commit_steps=3)
    check(job, folder, PLAIN())
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    assert len(lines) <= 4 + 2 * len(job.sizes)


@pytest.mark.parametrize(
    ("events", "hosts", "sizes"),
    [
        ([Hosts(5, (ONE, TWO))], (ONE,), {1, 2}),
        ([Hosts(5, (TWO,))], (ONE, TWO, THREE), {3, 1}),
        ([Hosts(4, (TWO, THREE)), Hosts(9, (ONE, TWO, THREE)), Hosts(15, (ONE,))], (ONE, TWO), {2, 3, 1}),
        ([Hosts(5, (("h1", 3),))], (("h1", 1),), {1, 3}),
        ([Tell(5, 0)], (ONE, TWO, THREE), {3, 2}),
        ([Tell(5, 1), Tell(6, 0), Kill(12, 0), Hosts(12, (ONE, TWO, THREE))], (ONE, TWO, THREE), {3, 2, 1}),
    ],
    ids=str,
)
def test_hosts_come_and_go(events: list[Event], hosts: tuple[tuple[str, int], ...], sizes: set[int]) -> None:
    """No sample is lost or seen twice, also when the host of rank 0 is taken from the list or its worker signalled."""
    kind = ElasticThreadWorld if isinstance(events[0], Tell) else Complete
    job, folder = play(events, *hosts, kind=kind)
    check(job, folder, PLAIN())
    assert sizes <= set(job.sizes)


def test_below_the_fewest_and_back() -> None:
    """With fewer workers than --min-np the survivors wait for another (horovod issue #3494 deadlocks there)."""
    job, folder = play([Kill(6, rank=1)], ONE, TWO, fewest=2)
    check(job, folder, PLAIN())
    assert job.sizes == [2, 2]


@pytest.mark.parametrize("global_batch", [20, None])
def test_a_newcomer_takes_the_batch_layout_of_the_run(global_batch: int | None) -> None:
    """It is not refused because the same settings would make another layout on that many workers."""
    batch = {"global_batch_size": global_batch, "batch_size": 5, "accumulation_steps": 2}
    job, folder = play([Hosts(5, (ONE, TWO, THREE))], ONE, TWO, kind=Complete, **batch)
    check(job, folder, undisturbed(global_batch_size=20, batch_size=5))
    assert 3 in job.sizes


PER_WORKER = {"on_resize": "per-worker", "lr_scaling": "linear", "global_batch_size": None, "ledger": True}


def test_per_worker_batches_follow_the_world() -> None:
    config = small_config(epochs=2, batch_size=10, **PER_WORKER)
    run_elastic(lambda world: trained(world, config), dict([ONE, TWO]), [Kill(4, rank=1)], first=2, most=2)
    assert audit(Path("run")).faults == ()
    lines = [json.loads(line) for line in Path("run/ledger.jsonl").read_text().splitlines()]
    full = [line for line, after in itertools.pairwise(lines) if line["epoch"] == after["epoch"]]
    assert {(line["positions"][1] - line["positions"][0]) / line["world_size"] for line in full} == {10}
    assert {line["world_size"] for line in lines} == {1, 2}


@pytest.mark.parametrize(
    ("event", "why"), [(Hosts(4, (TWO,)), "hosts came or went"), (Kill(4, rank=0), "a rank was lost")], ids=str
)
def test_a_new_rank_0_writes_where_the_one_before_did(event: Event, why: str) -> None:
    """One job has one run folder, without --output-dir too; each change of world stands in metrics.jsonl."""
    config = small_config(epochs=1, output_dir=None, recipe="few", resume="never", ledger=True)
    job = run_elastic(lambda world: trained(world, config), dict([ONE, TWO]), [event], first=2, most=2)
    (folder,) = Path("runs").iterdir()
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 1, 10)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = [record["name"] for record in records if record["kind"] == "event"]
    assert names.count("start") == 1
    assert names.index("start") < names.index("world")
    first, *_ = events_of(folder)
    assert (first["previous_size"], first["world_size"], first["why"]) == (2, 1, why)
    assert first["step"] == 4 or isinstance(event, Hosts)
    assert first["seconds"] > 0
    assert {result.run_dir for result, _ in job.results} <= {folder, None}


EVENTS = st.one_of(
    st.builds(Kill, st.integers(1, STEPS), rank=st.integers(0, 2)),
    st.builds(KillMeeting, st.integers(1, 4), st.integers(0, 2), st.integers(1, 30)),
    st.builds(
        Hosts, st.integers(1, STEPS), st.lists(st.sampled_from([ONE, TWO, THREE]), min_size=1, unique=True).map(tuple)
    ),
)


@pytest.mark.parametrize("plays", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_any_history(plays: int) -> None:
    """Any sequence of deaths and host lists keeps the promises."""

    @settings(max_examples=plays, deadline=None)
    @given(events=st.lists(EVENTS, max_size=4))
    def any_history(events: list[Event]) -> None:
        job, folder = play(events, ONE, TWO, THREE, commit_steps=1)
        report = audit(folder)
        assert (report.faults, report.epochs, report.steps) == ((), 2, STEPS), report
        assert largest_difference(job.results[0][1], PLAIN()) <= TOLERANCE

    any_history()

"""What elastic training guarantees, with workers that are threads and faults that are data."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from hvd_train import checkpoint
from hvd_train.checkpoint import DiskStore
from hvd_train.errors import RankLost, StateLost
from hvd_train.launch import launcher
from hvd_train.run_files import ledger
from hvd_train.run_files.ledger import audit
from hvd_train.state import TrainState
from hvd_train.world.world import LocalWorld, Reduction, Request
from tests.support import runs
from tests.support.elastic import (
    ElasticThreadWorld,
    Event,
    Hosts,
    Job,
    Kill,
    KillMeeting,
    Tell,
    Unheard,
    UnheardSum,
    run_elastic,
)
from tests.support.runs import Weights, equal, largest_difference, small_config, trained
from tests.support.worlds import Killed, StoppingWorld

TOLERANCE = 1e-5
STEPS = 20
ONE, TWO, THREE, FOUR = ((f"h{n}", 1) for n in (1, 2, 3, 4))
NUMBERS = itertools.count()


def play(
    events: list[Event], *hosts: tuple[str, int], make: Any = runs.convnet, data: Any = runs.few_digits, **settings: Any
) -> tuple[Job, Path]:
    """A training of 20 steps through these events, and its run folder; the first world has all hosts."""
    folder = Path(f"run-{next(NUMBERS)}")
    limits = {name: settings.pop(name) for name in ("fewest", "most", "kind") if name in settings}
    config = small_config(epochs=2, ledger=True, output_dir=folder, **settings)
    job = run_elastic(
        lambda world: trained(world, config, make, data), dict(hosts), events, first=sum(n for _, n in hosts), **limits
    )
    assert job.finish is not None
    assert job.finish.exit_code == 0, job.finish
    return job, folder


def undisturbed(make: Any = runs.convnet, data: Any = runs.few_digits, **settings: Any) -> Weights:
    """The weights of the same training, alone and in peace."""
    config = small_config(epochs=2, output_dir=Path(f"undisturbed-{next(NUMBERS)}"), **settings)
    return trained(LocalWorld(), config, make, data)[1]


def check(job: Job, folder: Path, expected: Weights) -> None:
    """The promises: no step lost, each sample once, ranks bit-identical, the weights of the undisturbed run."""
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, STEPS), report
    assert all(event["steps_lost"] == 0 for event in events_of(folder))
    assert (written(folder, "step"), written(folder, "epoch")) == ([*range(1, STEPS + 1)], [1, 2])
    weights = [weights for _, weights in job.results]
    assert all(equal(weights[0], other) for other in weights)
    assert largest_difference(weights[0], expected) <= TOLERANCE
    assert equal(weights[0], torch.load(folder / "model-final.pt", weights_only=True))


def events_of(folder: Path) -> list[dict[str, Any]]:
    """The changes of world in metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("name") == "world"]


def best_weights(folder: Path) -> tuple[Weights, Weights]:
    """Those of a run and those of the last undisturbed one."""
    alone = Path(f"undisturbed-{next(NUMBERS) - 1}")
    best, of_alone = (torch.load(run / checkpoint.BEST, weights_only=True) for run in (folder, alone))
    return best, of_alone


def written(folder: Path, kind: str) -> list[int]:
    """The numbers of the steps or epochs in metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[kind] for line in lines if line["kind"] == kind]


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


@pytest.mark.parametrize(
    ("events", "hosts", "sizes"),
    [
        ([Hosts(5, (ONE, TWO))], (ONE,), {1, 2}),
        ([Hosts(5, (ONE,))], (ONE, TWO, THREE), {3, 1}),
        ([Hosts(5, (TWO,))], (ONE, TWO), {2, 1}),
        ([Hosts(5, (TWO, THREE))], (ONE, TWO), {2}),
        ([Hosts(4, (TWO, THREE)), Hosts(9, (ONE, TWO, THREE)), Hosts(15, (ONE,))], (ONE, TWO), {2, 3, 1}),
        ([Hosts(5, (("h1", 3),))], (("h1", 1),), {1, 3}),
        ([Tell(5, 0)], (ONE, TWO, THREE), {3, 2}),
        ([Tell(5, 1), Tell(6, 0), Kill(12, 0), Hosts(12, (ONE, TWO, THREE))], (ONE, TWO, THREE), {3, 2, 1}),
    ],
    ids=str,
)
def test_hosts_come_and_go(events: list[Event], hosts: tuple[tuple[str, int], ...], sizes: set[int]) -> None:
    """Nobody's samples are lost or seen twice, also when the host of rank 0 is taken from the list or told to end."""
    job, folder = play(events, *hosts)
    check(job, folder, undisturbed())
    assert sizes <= set(job.sizes)


def test_below_the_fewest_and_back() -> None:
    """With fewer workers than --min-np the survivors wait for another (horovod issue #3494 deadlocks there)."""
    job, folder = play([Kill(6, rank=1)], ONE, TWO, fewest=2)
    check(job, folder, undisturbed())
    assert job.sizes == [2, 2]


@pytest.mark.parametrize("exchange", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("rank", [0, 1])
def test_deaths_while_the_ranks_meet(rank: int, exchange: int) -> None:
    """A second fault while the first is being recovered from: wherever in that it strikes, the promises hold."""
    job, folder = play([Kill(7, rank=2), KillMeeting(2, rank, exchange)], ONE, TWO, THREE)
    check(job, folder, undisturbed())


@pytest.mark.parametrize("exchange", [1, 2, 4])
def test_a_first_meeting_that_breaks(exchange: int) -> None:
    """Survivors of it have an optimizer that is wrapped once, and a cut for the world that they come to."""
    worlds: list[ElasticThreadWorld] = []
    config = small_config(epochs=2, ledger=True, output_dir=Path("run"), global_batch_size=None, batch_size=10)

    def body(world: ElasticThreadWorld) -> Any:
        worlds.append(world)
        return trained(world, config)

    run_elastic(body, {"h1": 1, "h2": 1, "h3": 1}, [KillMeeting(1, 1, exchange)], first=3, most=3)
    assert {world.wraps for world in worlds} <= {0, 1}
    assert audit(Path("run")).faults == ()


HALF_WAY = 7  # of the exchanges of a meeting: the state has begun to travel and is not all there


def test_a_rank_that_is_ahead_dies_while_it_sends_its_state() -> None:
    """Those behind still have their own state, whole, and go on from it: the step is taken again."""

    class OnlyRank0Hears(ElasticThreadWorld):
        """The reductions of step 7 are done on rank 0 alone."""

        @contextmanager
        def reduced(self, optimizer: Optimizer) -> Iterator[None]:
            with super().reduced(optimizer):
                if self._job.sizes == [3] and self.place.rank > 0 and self._steps == 7:
                    raise RankLost("unheard")
                yield

    job, folder = play([KillMeeting(2, 0, HALF_WAY)], ONE, TWO, THREE, kind=OnlyRank0Hears)
    check(job, folder, undisturbed())
    assert not job.events
    assert events_of(folder)[0]["step"] == 7  # the first after the fault


def test_distrust_outlives_a_fault_while_the_last_commit_is_loaded() -> None:
    """Rank 0 has it already, and so is at another step than a survivor with false weights: these are not taken."""

    class HalfASum(ElasticThreadWorld):
        """The eighth step gives rank 1 false weights."""

        @contextmanager
        def reduced(self, optimizer: Optimizer) -> Iterator[None]:
            with super().reduced(optimizer):
                yield
            if self._job.sizes == [4] and self.place.rank == 1 and self._steps == 8:
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.data += 0.01

    events = [Kill(9, rank=3), KillMeeting(2, 2, HALF_WAY)]
    job, folder = play(events, ONE, TWO, THREE, ("h4", 1), kind=HalfASum, commit_steps=6)
    assert not job.events
    assert audit(folder).faults == ()
    assert [event["steps_lost"] for event in events_of(folder)][:1] == [2]
    assert largest_difference(job.results[0][1], undisturbed()) <= TOLERANCE


@pytest.mark.parametrize("exchange", [4, HALF_WAY])
def test_a_newcomer_that_has_half_a_state_goes_on_from_the_last_commit(exchange: int) -> None:
    """The only rank that had a whole one died while it sent it."""
    events = [Hosts(5, (ONE, TWO)), KillMeeting(2, 0, exchange)]
    job, folder = play(events, ONE, commit_steps=1)
    check(job, folder, undisturbed())
    assert not job.events


def test_a_newcomer_that_has_half_a_state_and_no_commit_does_not_train_on_from_it() -> None:
    """It ends, and the job begins again in a new process."""
    with pytest.raises(StateLost, match="no checkpoint yet"):
        play([Hosts(3, (ONE, TWO)), KillMeeting(2, 0, HALF_WAY)], ONE, commit_steps=None, commit_seconds=1000)


def test_a_fresh_state_may_come_from_another_rank_than_the_first() -> None:
    """Rank 0 of the second world has half a state from the first; the newcomer gives its own, with a cut."""
    job, folder = play([KillMeeting(1, 0, HALF_WAY)], ONE, TWO, fewest=2)
    check(job, folder, undisturbed())
    assert not job.events


@pytest.mark.parametrize(
    "batch",
    [
        {"global_batch_size": 20, "batch_size": 5, "accumulation_steps": 2},
        {"global_batch_size": None, "batch_size": 5, "accumulation_steps": 2},
    ],
    ids=str,
)
def test_a_newcomer_takes_the_cut_of_the_run(batch: dict[str, Any]) -> None:
    """It is not turned away because the same settings would make another one on so many workers."""
    job, folder = play([Hosts(5, (ONE, TWO, THREE))], ONE, TWO, **batch)
    check(job, folder, undisturbed(global_batch_size=20, batch_size=5))
    assert 3 in job.sizes


def test_a_worker_whose_share_exceeds_the_data_may_join() -> None:
    """With --on-resize per-worker the global batch grows to the whole training set at most."""
    settings = {"on_resize": "per-worker", "lr_scaling": "linear", "global_batch_size": None, "batch_size": 80}
    config = small_config(epochs=4, ledger=True, **settings)
    job = run_elastic(lambda world: trained(world, config), {"h1": 1, "h2": 1}, [Hosts(2, (ONE, TWO, THREE))], first=2)
    assert audit(Path("run")).faults == ()
    assert 3 in job.sizes


def test_loader_processes_survive() -> None:
    """Images that loader processes read ahead for the broken step are not taken for those of the next one."""
    job, folder = play([Kill(7, rank=1)], ONE, TWO, data=runs.mapped_digits, workers=1)
    check(job, folder, undisturbed(data=runs.mapped_digits))


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


def test_the_best_weights_survive_the_rank_that_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies after an evaluation, before model-best.pt is there; another rank writes the same weights."""
    save = DiskStore.save_weights
    deaths = [Killed("while it writes the best weights")]

    def dies_once(store: DiskStore, name: str, state: TrainState) -> None:
        if name == checkpoint.BEST and deaths:
            raise deaths.pop()
        save(store, name, state)

    monkeypatch.setattr(DiskStore, "save_weights", dies_once)
    job, folder = play([], ONE, TWO)
    check(job, folder, undisturbed())
    assert not deaths
    assert largest_difference(*best_weights(folder)) <= TOLERANCE


@pytest.mark.parametrize("file", ["write", "write_weights"])
def test_a_rank_that_dies_while_it_writes_the_last_files_is_replaced(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank leaves before they are on disk, so another one writes them, from its live weights."""
    writes = getattr(checkpoint, file)
    deaths = [Killed("while it writes the last files")]

    def dies_once(path: Path, *rest: Any) -> None:
        if deaths and ("final" in path.name or path.name == f"step-{STEPS:010}.ckpt"):
            raise deaths.pop()
        writes(path, *rest)

    monkeypatch.setattr(checkpoint, file, dies_once)
    job, folder = play([], ONE, TWO, THREE, most=3)
    check(job, folder, undisturbed())
    assert not deaths
    assert job.sizes[1] == 2
    assert len(job.results) == 2
    assert all(result.finished and result.saved for result, _ in job.results)
    assert checkpoint.committed(folder)[0] == checkpoint.path_of(folder, STEPS)
    assert (folder / "summary.json").exists()


def test_a_rank_that_dies_while_it_commits_a_stop_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank leaves before the last commit is on disk, so another one writes it, and says that it is."""
    write = checkpoint.write
    deaths = [Killed("while it commits")]

    class Stopped(ElasticThreadWorld):
        def requested(self, *, told_to_end: bool = False) -> Request:
            return "stop" if self._job.steps >= 6 else super().requested(told_to_end=told_to_end)

    def dies_once(path: Path, *rest: Any) -> None:
        if deaths:
            raise deaths.pop()
        write(path, *rest)

    monkeypatch.setattr(checkpoint, "write", dies_once)
    job, folder = play([], ONE, TWO, most=2, kind=Stopped)
    assert not deaths
    results = [result for result, _ in job.results]
    assert [(result.finished, result.saved) for result in results] == [(False, True)] * len(results)
    assert checkpoint.committed(folder)[0] == checkpoint.path_of(folder, results[0].steps)
    assert audit(folder).faults == ()


def test_the_wait_for_a_newcomer_is_told() -> None:
    """The seconds to the next step count what the newcomer does after the ranks have met, to the end of that step."""
    delays = [0.5]

    class Slow(ElasticThreadWorld):
        def wrap(self, optimizer: Optimizer, model: nn.Module, reduction: Reduction) -> Optimizer:
            if self.place.size == 2 and delays:
                time.sleep(delays.pop())
            return super().wrap(optimizer, model, reduction)

    _, folder = play([Hosts(5, (ONE, TWO))], ONE, kind=Slow)
    (joined,) = events_of(folder)
    assert not delays
    assert joined["seconds"] >= 0.5


def test_the_user_is_told_of_each_change() -> None:
    """Old and new size, why, seconds and steps lost stand in metrics.jsonl."""
    _, folder = play([Kill(7, rank=1)], ONE, TWO, most=2)
    first, *_ = events_of(folder)
    assert (first["previous_size"], first["world_size"], first["step"]) == (2, 1, 7)
    assert first["why"] == "a rank was lost"
    assert 0 < first["seconds"] < 30


def test_per_worker_batches_follow_the_world() -> None:
    """With --on-resize per-worker a step takes as many samples per worker as before."""
    settings = {"on_resize": "per-worker", "lr_scaling": "linear", "global_batch_size": None, "batch_size": 10}
    folder = Path("run")
    config = small_config(epochs=2, ledger=True, output_dir=folder, **settings)
    job = run_elastic(lambda world: trained(world, config), {"h1": 1, "h2": 1}, [Kill(4, rank=1)], first=2, most=2)
    assert audit(folder).faults == ()
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    full = [line for line, after in itertools.pairwise(lines) if line["epoch"] == after["epoch"]]
    assert {(line["positions"][1] - line["positions"][0]) / line["world_size"] for line in full} == {10}
    assert {line["world_size"] for line in lines} == {1, 2}
    assert job.finish is not None


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

"""A loop of the user's own: what it may do, and that faults do not change its result."""

import itertools
import multiprocessing
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from hvd_train.batches import Batches
from hvd_train.config import Config
from hvd_train.errors import ReplicasDiffer, UsageError
from hvd_train.loops import MicroBatch
from hvd_train.progress.order import Batch, in_order
from hvd_train.progress.shares import Speed
from hvd_train.run_files.ledger import audit
from hvd_train.session import Session, parse_args
from hvd_train.tasks.task import Each, Measure, Total
from hvd_train.world.world import LocalWorld, World
from tests.support import programs, runs
from tests.support.elastic import (
    ONE,
    THREE,
    TOLERANCE,
    TWO,
    Event,
    Hosts,
    Kill,
    KillGather,
    KillMeeting,
    Unheard,
    UnheardGather,
    UnheardSum,
    run_elastic,
)
from tests.support.launching import notes, records
from tests.support.programs import (
    Interrupted,
    Outcome,
    Program,
    Stop,
    digits,
    losses,
    measure,
    momentum,
    network,
    plain,
    take,
)
from tests.support.runs import NUM_SAMPLES, NUM_VAL, RUN, equal, largest_difference
from tests.support.worlds import own_generator, run_ranks

NUMBERS = itertools.count()
VAL = digits(NUM_VAL, "val")


def played(world: World, program: Program, **changes: Any) -> Outcome:
    """Play a program on digits, of which an epoch has ten steps."""
    data = digits(NUM_SAMPLES, "train")
    settings = {"make": network, "data": data, "global_batch_size": 20, "batch_size": 5, **changes}
    return programs.played(world, program, **settings)


def nasty(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
    """Count everywhere, change rates and weights by hand, and evaluate where counters say so."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    own = session.register(level=1, ticks=0, scheduler=scheduler)
    own.level += 3
    own.level += session.evaluate(VAL, measure, name="first").count
    for epoch in session.epochs():
        own.level += 1
        stop(10 * epoch.number, "at the head of an epoch")
        if own.level % 2:
            own.level += session.evaluate(VAL, measure, name="head").count % 7
        for step in epoch:
            own.ticks += 1
            stop(step.number, "before a step")
            for micro in step:
                stop(step.number, "within a step")
                micro.backward(losses(model, micro.batch))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.999)
            scheduler.step()
            stop(step.number)
            own.level = (own.level * 7 + step.scores.count) % 1009
            if own.level % 3 == 0:
                own.ticks += session.evaluate(VAL, measure, name="mid").count
        session.keep_best(session.evaluate(VAL, measure)["right"])
        own.level += epoch.number
        stop(10 * epoch.number, "after an epoch")
        own.ticks += session.evaluate(VAL, measure, name="tail").count
    own.level += session.evaluate(VAL, measure, name="end").count


def two_networks() -> dict[str, nn.Module]:
    layers = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 64), nn.Sigmoid()
    )
    critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1))
    return {"maker": own_generator(layers), "critic": own_generator(critic)}


def adversarial(session: Session, models: Any, optimizers: Any, stop: Stop) -> None:
    """Train two networks against each other; a registered counter decides how
    often the critic is updated.
    """
    maker = models["maker"]
    critic = models["critic"]
    own = session.register(ticks=0)

    def fakes(micro: MicroBatch) -> Tensor:  # threads share torch's random numbers
        made: Tensor = maker(
            torch.randn(len(micro), 8, generator=torch.Generator().manual_seed(micro.number))
        )
        return made

    def losses(images: Tensor, real: float) -> Tensor:
        logits = critic(images).squeeze(1)
        return F.binary_cross_entropy_with_logits(
            logits, torch.full_like(logits, real), reduction="none"
        )

    def distance(networks: nn.Module, batch: Any) -> dict[str, Measure]:
        made = networks["maker"](torch.ones(len(batch[0]), 8))
        return {"distance": (made - batch[0].flatten(1)).square().mean(1)}

    for epoch in session.epochs():
        for step in epoch:
            stop(step.number, "before a step")
            for _ in range(1 + own.ticks % 2):
                for micro in (update := step.update("critic")):
                    stop(step.number, "within a step")
                    images = micro.batch[0]
                    right = losses(images, 1.0)
                    micro.backward(right + losses(fakes(micro).detach(), 0.0), real=right)
            own.ticks += update.scores.count + 1
            stop(step.number, "between two updates")
            for micro in step.update("maker"):
                micro.backward(losses(fakes(micro), 1.0))
            own.ticks += 1
            stop(step.number)
        session.keep_best(session.evaluate(VAL, distance)["distance"], higher=False)


def disturbed(
    program: Program, events: list[Event], *hosts: tuple[str, int], **changes: Any
) -> tuple[Outcome, Path]:
    folder = Path(f"session-{next(NUMBERS)}")
    job = run_elastic(
        lambda world: played(world, program, folder=folder, ledger=True, commit_steps=1, **changes),
        dict(hosts),
        events,
        first=len(hosts),
    )
    assert all(values == job.results[0][1] for _, values, _ in job.results)
    return job.results[0], folder


PROGRAMS: dict[str, tuple[Program, Callable[[], Any]]] = {
    "one network": (nasty, network),
    "two networks": (adversarial, two_networks),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return what each program gives without faults, on one rank."""
    with pytest.MonkeyPatch.context() as patch:
        # as in each test: threads split sums
        patch.setattr(os, "sched_getaffinity", lambda pid: {0})
        return {
            name: played(
                LocalWorld(), program, make=make, folder=tmp_path_factory.mktemp("runs") / "run"
            )
            for name, (program, make) in PROGRAMS.items()
        }


def check(found: Outcome, expected: Outcome, folder: Path, allowed: float = TOLERANCE) -> None:
    assert found[1] == expected[1]
    assert largest_difference(found[0], expected[0]) <= allowed
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, 20), report


EVENTS = st.one_of(
    st.builds(Kill, st.integers(1, 20), rank=st.integers(0, 2)),
    st.builds(Unheard, st.integers(1, 20), rank=st.integers(0, 2)),
    st.builds(UnheardSum, st.just("evaluation"), st.integers(0, 2), st.integers(1, 12)),
    st.builds(KillMeeting, st.integers(1, 4), st.integers(0, 2), st.integers(1, 30)),
    st.builds(UnheardGather, st.integers(1, 4), st.integers(0, 2), st.integers(1, 8)),
    st.builds(
        Hosts,
        st.integers(1, 20),
        st.lists(st.sampled_from([ONE, TWO, THREE]), min_size=1, unique=True).map(tuple),
    ),
)


@pytest.mark.parametrize(
    "plays", [4, pytest.param(150, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_fault_changes_what_a_program_computes(
    name: str, plays: int, expected: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks die in updates, evaluations and meetings, miss a result that
    others have, come and go, and take other shares of each step.
    """
    program, make = PROGRAMS[name]
    next_batch = Batches.next

    def with_other_shares(batches: Batches, epoch: int) -> Batch:
        step = batches._state.progress.step
        random = np.random.default_rng(step)
        shares = batches._shares
        shares.follow_speed = batches._place.size > 1
        is_new_step = batches._last is None or batches._last[0] != step
        if is_new_step and np.random.default_rng([step, batches._place.rank]).random() < 0.3:
            batches.restart()  # so that ranks have looked up other steps ahead
        if is_new_step and step >= shares.begins:
            speeds = [Speed(0.0, random.uniform(1, 4)) for _ in range(batches._place.size)]
            shares.change(speeds, step + int(random.integers(1, 4)))
        return next_batch(batches, epoch)

    monkeypatch.setattr(Batches, "next", with_other_shares)

    @settings(max_examples=plays, deadline=None)
    @given(events=st.lists(EVENTS, max_size=4))
    def any_history(events: list[Event]) -> None:
        found, folder = disturbed(program, events, ONE, TWO, THREE, make=make)
        check(found, expected[name], folder)

    any_history()


# In the second world the ranks gather reports, claims, digests of the sent state, digests, and then
# begin the next sum.
@pytest.mark.parametrize(
    "events",
    [
        [Unheard(7, 1), Unheard(7, 2), UnheardGather(2, 2, 3)],
        [Unheard(7, 1), Unheard(7, 2), UnheardGather(2, 1, 3), KillGather(3, 0, 1)],
        [Unheard(7, 1), UnheardGather(2, 1, 5)],
    ],
    ids=str,
)
def test_a_second_fault_while_ranks_catch_up(
    events: list[Event], expected: dict[str, Outcome]
) -> None:
    """Some have loaded the state of the most advanced rank, others have not,
    and that rank may be gone.
    """
    found, folder = disturbed(nasty, events, ONE, TWO, THREE)
    check(found, expected["one network"], folder)


@pytest.mark.parametrize(
    ("name", "place", "step"),
    [  # an epoch has ten steps, and a commit is due after each fourth
        ("one network", "at the head of an epoch", 13),
        ("one network", "after an epoch", 10),
        ("one network", "before a step", 1),
        ("one network", "within a step", 13),
        ("one network", "after a step", 7),
        ("one network", "after a step", 10),
        ("two networks", "before a step", 10),
        ("two networks", "within a step", 1),
        ("two networks", "between two updates", 7),
        ("two networks", "after a step", 13),
    ],
)
def test_a_program_that_was_interrupted_resumes_to_the_bit(
    name: str, place: str, step: int, expected: dict[str, Outcome]
) -> None:
    """Wherever its code was: a commit is made at a point, or only if the program has
    not changed weights since.
    """
    program, make = PROGRAMS[name]
    settings = {"make": make, "ledger": True, "commit_steps": 4}
    with pytest.raises(Interrupted):
        played(LocalWorld(), program, **settings, stop_at=step, stop_in=place)
    check(played(LocalWorld(), program, **settings), expected[name], RUN, allowed=0)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (
            lambda model, optimizer, own: optimizer.param_groups[0].update(lr=0.25),
            "settings of the optimizer differ",
        ),
        (lambda model, optimizer, own: setattr(own, "level", 2), r"register\(level=...\) differ"),
        (lambda model, optimizer, own: nn.init.zeros_(model[1].bias), "bias"),
        (None, r"register\(level=...\) differ .*seed torch before"),  # from the start
    ],
)
def test_code_that_differs_between_ranks_ends_the_job_within_an_epoch(
    act: Callable[..., object] | None, says: str
) -> None:
    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        own = session.register(level=1 if act else session.rank)
        for epoch in session.epochs():
            for step in epoch:
                if act and session.rank == 1 and step.number == 3:
                    act(model, optimizer, own)
                take(step, model)
            assert epoch.number < 2

    def body(world: World) -> None:
        with pytest.raises(ReplicasDiffer, match=says) as raised:
            played(world, program)
        assert "the same on all ranks" in str(raised.value)
        assert ("seed torch before" in str(raised.value)) == (act is None)

    run_ranks(2, body)


BY_HAND = r"gradients have changed between micro-batches: leave out loss.backward\(\)"


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (
            lambda s, m, o, micro, loss: micro.backward(loss.mean()),
            r"'loss' .*shape \[\].* reduction='none'",
        ),
        (
            lambda s, m, o, micro, loss: [micro.backward(loss), micro.backward(loss)],
            "called twice",
        ),
        (
            lambda s, m, o, micro, loss: micro.backward(loss) or "twice",
            "step 1: its micro-batches come once",
        ),
        (
            lambda s, m, o, micro, loss: None,
            "backward was not called: give samples .* a loss of 0",
        ),
        (lambda s, m, o, micro, loss: micro.backward(loss) or "leave", "did not run to its end"),
        (
            lambda s, m, o, micro, loss: micro.backward(loss) or o.step(),
            r"leave out optimizer.step\(\)",
        ),
        (
            lambda s, m, o, micro, loss: o.zero_grad(),
            r"leave out optimizer.step\(\) and zero_grad\(\)",
        ),
        (lambda s, m, o, micro, loss: s.register(late=1), "register state before the loop"),
        (lambda s, m, o, micro, loss: micro.backward(loss, val_x=loss), "named 'val_x'"),
        (
            lambda s, m, o, micro, loss: micro.backward(loss, **{f"m{micro.number}": loss}),
            "m0, m1",
        ),
        (lambda s, m, o, micro, loss: s.evaluate(DATA, measure), "an evaluation within a step"),
        (
            lambda s, m, o, micro, loss: micro.backward(
                loss, wide=Each(torch.zeros(len(micro), 1 + micro.number))
            ),
            "other measures for one micro-batch than for another: wide",
        ),
        (
            lambda s, m, o, micro, loss: loss.mean().backward() or micro.backward(loss),
            BY_HAND,
        ),
        (lambda s, m, o, micro, loss: micro.backward(loss) or m.zero_grad(), BY_HAND),
        (
            lambda s, m, o, micro, loss: micro.backward(loss) or clip_grad_norm_(m.parameters(), 1),
            BY_HAND,
        ),
        (lambda s, m, o, micro, loss: s.constant(m), "constant before the first loop"),
        (lambda s, m, o, micro, loss: s.log(step=1), r"log\(step=...\): take another name"),
        (
            lambda s, m, o, micro, loss: (
                micro.backward(loss) or o.add_param_group({"params": nn.Linear(2, 2).parameters()})
            ),
            r"the optimizer has \d+ parameters that the model does not have",
        ),
    ],
)
def test_wrong_use_is_one_line(act: Callable[..., object], says: str) -> None:
    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            for micro in step:
                way = act(session, model, optimizer, micro, losses(model, micro.batch))
                if way == "leave":
                    break
            if way == "twice":
                next(iter(step))

    with pytest.raises(UsageError, match=says):
        played(LocalWorld(), program)


def set_gradients(model: nn.Module, factor: float | None) -> None:
    for parameter in model.parameters():
        parameter.grad = None if factor is None else parameter.grad * factor  # type: ignore[operator]


@pytest.mark.parametrize(
    ("act", "is_wrong"),
    [
        (lambda model: clip_grad_norm_(model.parameters(), 0.1), True),
        (lambda model: set_gradients(model, 0.5), True),
        (lambda model: set_gradients(model, None), False),
        (lambda model: [parameter.grad.norm() for parameter in model.parameters()], False),
    ],
)
def test_gradients_that_change_after_their_update_are_one_line(
    act: Callable[[nn.Module], object], is_wrong: bool
) -> None:
    def program(session: Session, model: nn.Module, *_: Any) -> None:
        for step in session.steps():
            for micro in step:
                micro.backward(losses(model, micro.batch))
            act(model)

    expected = pytest.raises(UsageError, match="after their update, which has no effect: clip by")
    with expected if is_wrong else nullcontext():
        played(LocalWorld(), program)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (
            lambda step: next(iter(step)),
            r"step 1: iterate over step.update\('maker'\) or step.update\('critic'\)",
        ),
        (lambda step: step.update("painter"), r"step 1: iterate over step.update\('maker'\) or"),
        (
            lambda step: next(iter(step.update("maker"))),
            "step 1: its loop over micro-batches did not run to its end",
        ),
        (lambda step: None, "step 1: its loop over micro-batches did not run to its end"),
        (
            lambda step: [next(iter(step.update(name))) for name in ("maker", "critic")],
            "in one loop",
        ),
    ],
)
def test_wrong_use_of_several_optimizers_is_one_line(
    act: Callable[[Any], object], says: str
) -> None:
    def program(session: Session, *_: Any) -> None:
        for step in session.steps():
            act(step)

    with pytest.raises(UsageError, match=says):
        played(LocalWorld(), program, make=two_networks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_step_counts_however_its_loop_ends(ranks: int) -> None:
    """By `break`, or though a variable keeps its iterator: with its moving average, and
    with the score of the epoch.
    """
    kept = list[Any]()

    def trained(world: World, way: str) -> Outcome:
        def program(session: Session, model: Any, optimizer: Any, stop: Stop) -> None:
            for epoch in session.epochs():
                steps = iter(epoch)
                kept.append(steps if way == "kept" else None)
                for step in itertools.islice(steps, 10 if way == "kept" else None):
                    take(step, model)
                    if way == "break" and step.number % 10 == 0:
                        steps.close()
                        break
                session.evaluate(VAL, measure)

        return played(world, program, folder=Path(way), ema_decay=0.5)

    ways = ("to the end", "break", "kept")
    outcomes = [run_ranks(ranks, lambda world, way=way: trained(world, way))[0] for way in ways]
    for way, outcome in zip(ways, outcomes, strict=True):
        assert equal(outcome[0], outcomes[0][0])
        averages = (torch.load(Path(each, "model-final.pt")) for each in (way, ways[0]))
        assert equal(*averages)
        is_scored = way != "kept"  # the program may go on with the steps
        epochs = [(line["step"], "val_loss" in line) for line in records("epoch", Path(way))]
        assert epochs == [(10, is_scored), (20, is_scored)]


def test_a_step_begins_in_training_mode() -> None:
    modes = set[bool]()

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        for epoch in session.epochs():
            for step in epoch:
                for micro in step:
                    modes.add(model.training)
                    micro.backward(losses(model, micro.batch))
            model.eval()  # for pictures

    played(LocalWorld(), program, make=lambda: network().eval())
    assert modes == {True}
    assert [note.partition(":")[0] for note in notes()] == [
        "the model was in evaluation mode when a step began"
    ]


def test_per_worker_batches_in_a_loop_of_ones_own() -> None:
    """The program sees the size of each step, also of one that was interrupted,
    and sets the learning rate.
    """

    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            optimizer.param_groups[0]["lr"] = 0.001 * session.global_batch
            take(step, model)
            assert step.scores.count == step.size

    settings = {"on_resize": "per-worker", "global_batch_size": None, "batch_size": 10}
    _, folder = disturbed(program, [Kill(4, rank=1)], ONE, TWO, **settings)
    assert audit(folder).faults == ()
    steps = records("step", folder)[:5]
    sizes = np.diff([0, *(step["samples"] for step in steps)])
    assert sizes.tolist() == [20, 20, 20, 20, 10]
    assert [step["learning_rate"] for step in steps] == [0.001 * size for size in sizes]


def test_code_aside_leaves_no_trace() -> None:
    """Pictures by a network in training mode, with dropout and batch norm, change
    no number of the training.
    """

    def looking(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            take(step, model)
            with session.aside() as writes:
                model.eval()
                model.train()
                assert writes
                assert not model(VAL[:9][0]).requires_grad
                model.eval()
            assert model.training

    def make() -> nn.Module:
        return own_generator(nn.Sequential(runs.batch_norm(10), nn.Dropout(0.1)))

    with_it, without = (
        played(LocalWorld(), program, make=make, folder=Path(program.__name__))
        for program in (looking, plain)
    )
    assert equal(with_it[0], without[0])


def test_a_teacher_is_a_constant() -> None:
    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        teacher = session.constant(network())
        assert not teacher.training
        for step in session.steps():
            for micro in step:
                wanted = teacher(micro.batch[0])
                assert not wanted.requires_grad
                micro.backward((model(micro.batch[0]) - wanted).square().mean(1))

    run_ranks(2, lambda world: played(world, program))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


class Distributed(torch.optim.SGD):
    """An optimizer as `hvd.DistributedOptimizer` makes it."""

    def skip_synchronize(self) -> None: ...


class Sharp(torch.optim.SGD):
    """An optimizer that asserts that it got a function of the loss."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "a closure is needed"


class Twice(torch.optim.SGD):
    """An optimizer whose step is in two parts."""

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


SGD = torch.optim.SGD
LINEAR = nn.Linear(4, 2)
DATA = TensorDataset(torch.zeros(8, 4), torch.zeros(8))


@pytest.mark.parametrize(
    "data", [torch.ones(8, 2), np.ones((8, 2), np.float32), [1.0] * 8, "a text."], ids=type
)
def test_data_are_whatever_has_a_length_and_items(data: Any) -> None:
    with Session(LINEAR, SGD(ITS_PARAMETERS), data, **SMALL) as session:
        for step in session.steps():
            for micro in step:
                assert len(micro.batch) == len(micro)
                micro.backward(LINEAR(torch.ones(len(micro), 4))[:, 0])


def test_a_session_that_has_ended_trains_no_more() -> None:
    sessions = list[Session]()
    played(LocalWorld(), lambda session, *_: sessions.append(session))
    with pytest.raises(UsageError, match="the session has ended"):
        next(sessions[0].steps())


TWO_LAYERS = nn.Sequential(LINEAR, nn.Linear(2, 1))
PARALLEL = DataParallel.__new__(DataParallel)
ITS_PARAMETERS = [*LINEAR.parameters()]
MORE = nn.Parameter(torch.ones(1))
OWN = SGD(ITS_PARAMETERS)
TWO_OPTIMIZERS = {"a": SGD(ITS_PARAMETERS), "b": SGD(ITS_PARAMETERS[:1])}


@pytest.mark.parametrize(
    ("model", "optimizers", "data", "settings", "says"),
    [
        (TWO_LAYERS, OWN, DATA, {}, r"the optimizer has no 1\.weight, 1\.bias: give it these"),
        (
            LINEAR,
            SGD([*ITS_PARAMETERS, MORE]),
            DATA,
            {},
            "1 parameter that the model does not have: give the session all models by name",
        ),
        (PARALLEL, OWN, DATA, {}, "without DistributedDataParallel"),
        (nn.Sequential(nn.DataParallel(LINEAR)), OWN, DATA, {}, "without DataParallel"),
        (
            nn.Linear,
            OWN,
            DATA,
            {},
            "the model is the class Linear; it must be a torch.nn.Module, or",
        ),
        ([LINEAR], OWN, DATA, {}, "or several by name: {'first': model"),
        ({}, {}, DATA, {}, "name a model and an optimizer"),
        (nn.Linear(4, 2, device="meta"), OWN, DATA, {}, "weight is on the device meta"),
        (nn.LazyLinear(2), OWN, DATA, {}, "weight has no shape yet: call the model once"),
        (LINEAR, [OWN], DATA, {}, "or several by name: {'first': optimizer"),
        (
            LINEAR,
            SGD,
            DATA,
            {},
            "the optimizer is the class SGD; it must be a torch.optim.Optimizer",
        ),
        (LINEAR, None, DATA, {}, "the optimizer is of type NoneType"),
        (
            LINEAR,
            torch.optim.lr_scheduler.StepLR(OWN, 1),
            DATA,
            {},
            "the optimizer is of type StepLR; it must be a torch.optim.Optimizer",
        ),
        (
            LINEAR,
            Distributed(ITS_PARAMETERS),
            DATA,
            {},
            "is a hvd.DistributedOptimizer: give the plain one",
        ),
        (LINEAR, Sharp(ITS_PARAMETERS), DATA, {}, "Sharp evaluates the loss several times a step"),
        (LINEAR, Twice(ITS_PARAMETERS), DATA, {}, "Twice evaluates the loss several times a step"),
        (
            LINEAR,
            OWN,
            DATA,
            {"compile": True},
            r"no effect .*: call model\.compile\(\) before the session",
        ),
        (LINEAR, OWN, DataLoader(DATA), {}, "not a DataLoader"),
        (LINEAR, OWN, Stream(), {}, "map-style data set"),
        (LINEAR, OWN, DATA.tensors, {}, r"\); give torch.utils.data.TensorDataset\("),
        (
            LINEAR,
            OWN,
            DATA,
            {"learning_rate": 0.3},
            "learning_rate=0.3 has no effect in a loop of your own",
        ),
        (
            LINEAR,
            OWN,
            DATA,
            {"lr_scaling": "sqrt"},
            "set the learning rate yourself, from session.global_batch",
        ),
        (LINEAR, OWN, DATA, {"epoch": 3}, "unknown setting 'epoch'"),
        (LINEAR, OWN, DATA, {"config": (None, Config())}, "config is a tuple: take the second"),
        (LINEAR, OWN, DATA, {"name": 3}, "name=3 is no text"),
        ({"keys": LINEAR}, OWN, DATA, {}, "'keys' cannot be the name of a model"),
        (LINEAR, TWO_OPTIMIZERS, DATA, {}, "two optimizers have weight"),
        (
            LINEAR,
            torch.optim.LBFGS(ITS_PARAMETERS),
            DATA,
            {},
            "evaluates the loss several times a step",
        ),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    model: nn.Module, optimizers: Any, data: Any, settings: Any, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        Session(model, optimizers, data, **settings)
    assert not Path("runs").exists()


SMALL: dict[str, Any] = {
    "epochs": 3,
    "global_batch_size": 4,
    "batch_size": 2,
    "device": "cpu",
    "workers": 0,
}


def test_an_evaluation_may_have_a_collate_of_its_own() -> None:
    """The default is that of the session."""

    def halved(items: list[tuple[Tensor, Tensor]]) -> Any:
        images, labels = torch.utils.data.default_collate(items)
        return images / 2, labels

    def brightness(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Measure]:
        return {"brightness": batch[0].mean((1, 2, 3))}

    model = network()
    plain = torch.utils.data.default_collate
    with Session(model, momentum(model), DATA, collate=halved, **SMALL) as session:
        dark, *others = (
            session.evaluate(VAL, brightness, name=name, collate=collate)["brightness"]
            for name, collate in (("a", None), ("b", halved), ("c", plain))
        )
    assert others == [dark, pytest.approx(2 * dark)]


def test_an_evaluation_may_be_without_figures() -> None:
    """As for embeddings, of which the program computes the figures itself."""

    def collect(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Measure]:
        return {"each": Each(batch[1]), "total": Total(batch[1].sum())}

    def program(session: Session, *_: Any) -> None:
        scores = session.evaluate(VAL, collect)
        labels = VAL.tensors[1]
        assert torch.equal(scores.each("each"), labels)
        assert scores.total("total") == labels.sum()

    run_ranks(2, lambda world: played(world, program))


def test_a_set_that_is_made_for_each_evaluation_has_one_loader_process() -> None:
    processes = []

    def program(session: Session, model: nn.Module, *_: Any) -> None:
        for epoch in session.epochs():
            session.evaluate(Subset(VAL, range(epoch.number, epoch.number + 4)), measure)
            processes.append(len(multiprocessing.active_children()))
            for step in epoch:
                take(step, model)
                break

    played(LocalWorld(), program, workers=1, epochs=3)
    assert len(processes) == 3
    assert processes[1] == processes[2]


def test_ranks_that_evaluate_other_data_are_refused() -> None:
    def program(session: Session, *_: Any) -> None:
        session.evaluate(digits(NUM_VAL, ("val", "train")[session.rank]), measure)

    with pytest.raises(UsageError, match="the ranks differ in the items of the val set"):
        run_ranks(2, lambda world: played(world, program))


class Levels(TensorDataset):
    def begin_epoch(self, epoch: int) -> None:
        self.level = epoch


def test_a_set_that_changes_with_the_epochs_is_not_evaluated_as_well() -> None:
    data = Levels(*digits(NUM_SAMPLES, "train").tensors)
    says = r"Levels.begin_epoch would change the set to evaluate, too"
    with pytest.raises(UsageError, match=says):
        played(
            LocalWorld(),
            lambda session, *_: session.evaluate(Subset(data, range(90, 100)), measure),
            data=Subset(data, range(90)),
        )


def turned(seed: int, epoch: int, num_samples: int) -> list[int]:
    """Return an order of the user's own: backwards, and in each epoch from another place."""
    return [(19 * epoch - number) % num_samples for number in range(num_samples)]


def drawn_order(seed: int, epoch: int, num_samples: int) -> Tensor:
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))


def taken(world: World, order: Any, **settings: Any) -> dict[tuple[int, int], list[int]]:
    """Return the samples of each micro-batch of this rank, by step and number."""
    found = {}

    def program(session: Session, model: nn.Module, *_: Any) -> None:
        for step in session.steps():
            for micro in step:
                micro.backward(losses(model, micro.batch))
                found[step.number, micro.number] = micro.samples.tolist()

    played(world, program, order=order, ledger=True, **settings)
    return found


@pytest.mark.parametrize(("order", "drop_last"), [(turned, True), (drawn_order, False)])
def test_an_order_of_ones_own_is_the_same_on_any_number_of_ranks(
    order: Callable[..., Any], drop_last: bool
) -> None:
    """The last samples of each epoch, which do not fill a global batch, may be left out.

    The audit knows it.
    """
    length = 180 if drop_last else 190
    expected = [int(n) for epoch in (0, 1) for n in order(0, epoch, NUM_SAMPLES)[:length]]
    for size in (1, 2, 3):
        folder = Path(f"{size}")
        settings = {"drop_last": drop_last, "folder": folder}
        of_ranks = run_ranks(size, lambda world: taken(world, order, **settings))  # noqa: B023
        pieces = sorted(pair for each in of_ranks for pair in each.items())
        assert [n for _, samples in pieces for n in samples] == expected
        report = audit(folder)
        assert (report.faults, report.epochs, report.steps) == ((), 2, 18 if drop_last else 20)
        assert ("180 of 190 samples" in str(report)) == drop_last


def test_a_run_keeps_its_order() -> None:
    """Another one is refused when it resumes, and so is one that differs between ranks or calls."""
    with pytest.raises(UsageError, match="the ranks differ in the order of samples"):
        run_ranks(2, lambda world: taken(world, (turned, drawn_order)[world.place.rank]))
    with pytest.raises(Interrupted):
        played(LocalWorld(), plain, order=turned, stop_at=3)
    for other in (None, in_order, drawn_order):
        with pytest.raises(UsageError, match="order"):
            played(LocalWorld(), plain, order=other)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (
            lambda seed, epoch: range(9),
            r"order=<lambda> must return each number from 0 to 189 once, for epoch 0",
        ),
        (lambda seed, epoch: [0] * NUM_SAMPLES, "must return each number from 0 to 189 once"),
        (lambda seed, epoch, n: np.random.default_rng().permutation(n), "when it is called again"),
        ("in-order", "give a function, such as hvd_train.in_order"),
    ],
)
def test_an_order_that_cannot_be_kept_is_one_line(order: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        played(LocalWorld(), plain, order=order)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_session_reads_items_without_a_trace(workers: int) -> None:
    """Numbers that the program draws later do not depend on those that items draw."""

    def drawn(*, jitter: bool) -> Tensor:
        torch.manual_seed(5)
        model = network()
        data = runs.Jittered(20, jitter=jitter)
        with Session(
            model, momentum(model), data, **{**SMALL, "workers": workers}, world=LocalWorld()
        ):
            return torch.rand(3)

    assert torch.equal(drawn(jitter=True), drawn(jitter=False))


@pytest.mark.parametrize(
    ("typed", "says"), [("--lr 0.1", "learning_rate=0.1"), ("--no-nesterov", "nesterov=False")]
)
def test_a_flag_without_effect_is_refused_with_its_default_value(
    typed: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", "--epochs", "2", *typed.split()])
    _, config = parse_args()
    with pytest.raises(
        UsageError, match=f"{says} has no effect in a loop of your own: leave it out"
    ):
        Session(LINEAR, OWN, DATA, config=config.replace(epochs=3), world=LocalWorld())


@pytest.mark.parametrize("typed", ["--epochs 2 --seed 3", "--epochs-warmup 4 --epochs 2 --seed 3"])
def test_a_flag_of_the_run_is_not_short_for_one_of_the_script(
    typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", *typed.split()])
    parser = ArgumentParser()
    parser.add_argument("--epochs-warmup", type=int, default=4)
    parser.add_argument("--seed-data", type=int, default=7)
    own, config = parse_args(parser)
    assert vars(own) == {"epochs_warmup": 4, "seed_data": 7}
    assert (config.schedule.epochs, config.seed) == (2, 3)


@pytest.mark.parametrize(
    ("typed", "epochs", "seed", "workers"),
    [("", 3, 7, None), ("--epochs 2 --seed 5 --workers 1", 2, 5, 1), ("--resume x", 3, 7, None)],
)
def test_a_flag_of_the_script_with_the_name_of_a_setting_sets_it_too(
    typed: str,
    epochs: int,
    seed: int,
    workers: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", *typed.split()])
    parser = ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--resume", default="")
    own, config = parse_args(parser, seed=7)
    assert (own.epochs, own.lr) == (epochs, 0.3)
    assert (config.schedule.epochs, config.seed, config.data.workers) == (epochs, seed, workers)
    assert f"a setting set it, too: epochs={epochs}" in capsys.readouterr().err
    assert config.run.resume == "auto"  # a text may mean something else in the script
    assert "learning_rate" not in config.given

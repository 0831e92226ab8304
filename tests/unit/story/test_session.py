"""A loop of the user's own: what it may do, and that faults do not change its result."""

import functools
import itertools
import multiprocessing
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Subset, TensorDataset

from hvd_train.batches import Batches
from hvd_train.config import Config
from hvd_train.errors import ReplicasDiffer, UsageError
from hvd_train.loops import Epoch, MicroBatch, Step
from hvd_train.progress.order import Batch
from hvd_train.progress.shares import Speed
from hvd_train.run_files.ledger import audit
from hvd_train.session import Session, parse_args
from hvd_train.tasks.task import Each, Measure
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
        generator = torch.Generator().manual_seed(micro.number)
        return maker(torch.randn(len(micro), 8, generator=generator))

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
                    right = losses(micro.batch[0], 1.0)
                    wrong = losses(fakes(micro).detach(), 0.0)
                    stop(step.number, "within a step")  # when batch norm has seen the samples
                    micro.backward(right + wrong, real=right)
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


PROGRAMS = {
    "one network": (nasty, network),
    "two networks": (adversarial, two_networks),
}


@functools.cache
def undisturbed(name: str) -> Outcome:
    """Return what a program gives without faults, on one rank."""
    program, make = PROGRAMS[name]
    return played(LocalWorld(), program, make=make, folder=Path("undisturbed"))


def check(found: Outcome, expected: Outcome, folder: Path, allowed: float = TOLERANCE) -> None:
    assert found[1] == expected[1]
    assert largest_difference(found[0], expected[0]) <= allowed
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, 20), report


STEP = st.integers(1, 20)
RANK = st.integers(0, 2)
WORLD = st.integers(1, 4)
EVENTS = st.one_of(
    st.builds(Kill, STEP, rank=RANK),
    st.builds(Unheard, STEP, rank=RANK),
    st.builds(UnheardSum, st.just("evaluation"), RANK, st.integers(1, 12)),
    st.builds(KillMeeting, WORLD, RANK, st.integers(1, 30)),
    st.builds(UnheardGather, WORLD, RANK, st.integers(1, 8)),
    st.builds(
        Hosts,
        STEP,
        st.lists(st.sampled_from([ONE, TWO, THREE]), min_size=1, unique=True).map(tuple),
    ),
)


@pytest.mark.parametrize(
    "plays", [4, pytest.param(150, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_fault_changes_what_a_program_computes(
    name: str, plays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks die in updates, evaluations and meetings, miss a result that
    others have, come and go, and take other shares of each step.
    """
    program, make = PROGRAMS[name]
    expected = undisturbed(name)
    next_batch = Batches.next

    def with_other_shares(batches: Batches, epoch: int) -> Batch:
        step = batches._state.progress.step
        shares = batches._shares
        shares.follow_speed = batches._place.size > 1
        is_new_step = batches._last is None or batches._last[0] != step
        if is_new_step and np.random.default_rng([step, batches._place.rank]).random() < 0.3:
            batches.restart()  # so that ranks have looked up other steps ahead
        if is_new_step and step >= shares.begins:
            random = np.random.default_rng(step)
            speeds = [Speed(0.0, random.uniform(1, 4)) for _ in range(batches._place.size)]
            shares.change(speeds, step + int(random.integers(1, 4)))
        return next_batch(batches, epoch)

    monkeypatch.setattr(Batches, "next", with_other_shares)

    @settings(max_examples=plays, deadline=None)
    @given(events=st.lists(EVENTS, max_size=4))
    def any_history(events: list[Event]) -> None:
        found, folder = disturbed(program, events, ONE, TWO, THREE, make=make)
        check(found, expected, folder)

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
def test_a_second_fault_while_ranks_catch_up(events: list[Event]) -> None:
    """Some have loaded the state of the most advanced rank, others have not,
    and that rank may be gone.
    """
    found, folder = disturbed(nasty, events, ONE, TWO, THREE)
    check(found, undisturbed("one network"), folder)


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
        ("two networks", "within a step", 15),
        ("two networks", "between two updates", 7),
        ("two networks", "after a step", 13),
    ],
)
def test_a_program_that_was_interrupted_resumes_to_the_bit(
    name: str, place: str, step: int
) -> None:
    """Wherever its code was: a commit is made at a point, or only if the program has
    not changed weights since.
    """
    program, make = PROGRAMS[name]
    settings = {"make": make, "ledger": True, "commit_steps": 4}
    with pytest.raises(Interrupted):
        played(LocalWorld(), program, **settings, stop_at=step, stop_in=place)
    check(played(LocalWorld(), program, **settings), undisturbed(name), RUN, allowed=0)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (
            lambda model, optimizer, own: optimizer.param_groups[0].update(lr=0.25),
            "settings of the optimizer differ .* the same on all ranks; a module that runs in",
        ),
        (
            lambda model, optimizer, own: setattr(own, "level", 2),
            r"register\(level=...\) differ .* the same on all ranks",
        ),
        (
            lambda model, optimizer, own: nn.init.zeros_(model[1].bias),
            "bias.* the same on all ranks",
        ),
        (None, r"register\(level=...\) differ .*seed torch before"),  # from the start
    ],
)
def test_code_that_differs_between_ranks_ends_the_job_within_an_epoch(
    act: Callable[..., object] | None, says: str
) -> None:
    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        own = session.register(level=1 if act else session.rank)
        for step in session.steps():
            if act and session.rank == 1 and step.number == 3:
                act(model, optimizer, own)
            assert step.number < 12
            take(step, model)

    def body(world: World) -> None:
        with pytest.raises(ReplicasDiffer, match=says):
            played(world, program)

    run_ranks(2, body)


BY_HAND = r"gradients have changed between micro-batches: leave out loss.backward\(\)"


@pytest.mark.parametrize(
    ("measures", "says"),
    [
        (lambda micro, loss: {"loss": loss, "val_x": loss}, "named 'val_x'"),
        (lambda micro, loss: {"loss": loss, f"m{micro.number}": loss}, "m0, m1"),
        (
            lambda micro, loss: {"loss": loss, "wide": Each(torch.zeros(5, 1 + micro.number))},
            "other measures for one micro-batch than for another: wide",
        ),
        (lambda micro, loss: loss.mean().backward() or {"loss": loss}, BY_HAND),
    ],
)
def test_measures_that_cannot_be_summed_are_one_line(
    measures: Callable[..., Any], says: str
) -> None:
    def program(session: Session, model: nn.Module, *_: Any) -> None:
        for step in session.steps():
            for micro in step:
                micro.backward(**measures(micro, losses(model, micro.batch)))

    with pytest.raises(UsageError, match=says):
        played(LocalWorld(), program)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda s, m, o: o.step(), r"leave out optimizer.step\(\) and zero_grad\(\)"),
        (lambda s, m, o: o.zero_grad(), r"leave out optimizer.step\(\) and zero_grad\(\)"),
        (lambda s, m, o: clip_grad_norm_(m.parameters(), 1), BY_HAND),
        (
            lambda s, m, o: o.add_param_group({"params": nn.Linear(2, 2).parameters()}),
            r"the optimizer has \d+ parameters that the model does not have",
        ),
        (lambda s, m, o: s.register(late=1), "register state before the loop"),
        (lambda s, m, o: s.evaluate(DATA, measure), "an evaluation within a step"),
        (lambda s, m, o: s.constant(m), "constant before the first loop"),
        (lambda s, m, o: s.log(step=1), r"log\(step=...\): take another name"),
    ],
)
def test_what_does_not_belong_into_a_step_is_one_line(act: Callable[..., Any], says: str) -> None:
    def program(session: Session, model: nn.Module, optimizer: Optimizer, stop: Stop) -> None:
        for step in session.steps():
            for micro in step:
                micro.backward(losses(model, micro.batch))
                act(session, model, optimizer)

    with pytest.raises(UsageError, match=says):
        played(LocalWorld(), program)


UNFINISHED = "step 1: its loop over micro-batches did not run to its end"


@pytest.mark.parametrize(
    ("make", "act", "says"),
    [
        (network, lambda step, model: None, UNFINISHED),
        (network, lambda step, model: next(iter(step)), UNFINISHED),
        (
            network,
            lambda step, model: [*step],
            "backward was not called: give samples .* a loss of 0",
        ),
        (
            network,
            lambda step, model: [
                micro.backward(losses(model, micro.batch)) for micro in step for _ in range(2)
            ],
            "called twice",
        ),
        (
            network,
            lambda step, model: take(step, model) or next(iter(step)),
            "step 1: its micro-batches come once",
        ),
        (
            network,
            lambda step, model: take(step, model) or clip_grad_norm_(model.parameters(), 0.1),
            "after their update, which has no effect: clip by",
        ),
        (
            two_networks,
            lambda step, models: next(iter(step)),
            r"step 1: iterate over step.update\('maker'\) or step.update\('critic'\)",
        ),
        (
            two_networks,
            lambda step, models: next(iter(step.update("painter"))),
            r"step 1: iterate over step.update\('maker'\) or",
        ),
        (
            two_networks,
            lambda step, models: [next(iter(step.update(name))) for name in ("maker", "critic")],
            "in one loop",
        ),
    ],
)
def test_a_wrong_loop_over_micro_batches_is_one_line(
    make: Callable[[], Any], act: Callable[..., Any], says: str
) -> None:
    def program(session: Session, model: Any, *_: Any) -> None:
        for step in session.steps():
            act(step, model)

    with pytest.raises(UsageError, match=says):
        played(LocalWorld(), program, make=make)


def test_gradients_may_be_read_and_removed_after_their_update() -> None:
    def program(session: Session, model: nn.Module, *_: Any) -> None:
        for step in session.steps():
            take(step, model)
            assert all(parameter.grad.norm() >= 0 for parameter in model.parameters())
            model.zero_grad()

    played(LocalWorld(), program)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_step_counts_however_its_loop_ends(ranks: int) -> None:
    """By leaving it, or though a variable keeps its iterator: with its moving average, and
    with the score of the epoch.
    """
    kept = []

    def trained(folder: Path, steps_of: Callable[[Epoch], Iterator[Step]]) -> list[Any]:
        def program(session: Session, model: nn.Module, *_: Any) -> None:
            for epoch in session.epochs():
                for step in steps_of(epoch):
                    take(step, model)
                session.evaluate(VAL, measure)

        run_ranks(ranks, lambda world: played(world, program, folder=folder, ema_decay=0.5))
        return records("epoch", folder)

    def some_kept(epoch: Epoch) -> Iterator[Step]:
        kept.append(iter(epoch))
        return itertools.islice(kept[-1], 10)

    ways = {"all": iter, "left": lambda epoch: itertools.islice(epoch, 10), "kept": some_kept}
    for way, steps_of in ways.items():
        epochs = trained(Path(way), steps_of)
        is_scored = way != "kept"  # the program may go on with the steps
        found = [(line["step"], "val_loss" in line) for line in epochs]
        assert found == [(10, is_scored), (20, is_scored)]
        assert equal(*(torch.load(Path(each, "model-final.pt")) for each in (way, "all")))


def test_a_step_begins_in_training_mode() -> None:
    modes = set()

    def program(session: Session, model: nn.Module, *_: Any) -> None:
        for epoch in session.epochs():
            for step in epoch:
                for micro in step:
                    modes.add(model.training)
                    micro.backward(losses(model, micro.batch))
            model.eval()  # for pictures

    played(LocalWorld(), program, make=lambda: network().eval())
    assert modes == {True}
    (note,) = notes()
    assert note.startswith("the model was in evaluation mode when a step began")


def test_code_aside_leaves_no_trace() -> None:
    """Pictures by a network in training mode, with dropout and batch norm, change
    no number of the training.
    """

    def looking(session: Session, model: nn.Module, *_: Any) -> None:
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
    def program(session: Session, *_: Any) -> None:
        teacher = session.constant(network())
        assert not teacher.training
        assert not any(parameter.requires_grad for parameter in teacher.parameters())

    run_ranks(2, lambda world: played(world, program))


class Distributed(torch.optim.SGD):
    """An optimizer as `hvd.DistributedOptimizer` makes it."""

    def skip_synchronize(self) -> None: ...


class Sharp(torch.optim.SGD):
    """An optimizer that asserts that it got a function of the loss."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "a closure is needed"


class Twice(torch.optim.SGD):
    """An optimizer whose step is in two parts."""

    first_step = second_step = torch.optim.SGD.step


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
    sessions = []
    played(LocalWorld(), lambda session, *_: sessions.append(session))
    with pytest.raises(UsageError, match="the session has ended"):
        next(sessions[0].steps())


ITS_PARAMETERS = [*LINEAR.parameters()]
OWN = SGD(ITS_PARAMETERS)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"model": nn.Sequential(LINEAR, nn.Linear(2, 1))},
            r"the optimizer has no 1\.weight, 1\.bias: give it these",
        ),
        (
            {"optimizer": SGD([*ITS_PARAMETERS, nn.Parameter(torch.ones(1))])},
            "1 parameter that the model does not have: give the session all models by name",
        ),
        ({"model": nn.Sequential(nn.DataParallel(LINEAR))}, "without DataParallel"),
        (
            {"model": DistributedDataParallel.__new__(DistributedDataParallel)},
            "without DistributedDataParallel",
        ),
        (
            {"model": nn.Linear},
            "the model is the class Linear; it must be a torch.nn.Module, or several by name: {",
        ),
        ({"model": {}}, "name a model and an optimizer"),
        ({"model": nn.Linear(4, 2, device="meta")}, "weight is on the device meta"),
        ({"model": nn.LazyLinear(2)}, "weight has no shape yet: call the model once"),
        ({"model": {"keys": LINEAR}}, "'keys' cannot be the name of a model"),
        (
            {"optimizer": [OWN]},
            "the optimizer is of type list; .* or several by name: {'first': optimizer",
        ),
        (
            {"optimizer": Distributed(ITS_PARAMETERS)},
            "is a hvd.DistributedOptimizer: give the plain one",
        ),
        (
            {"optimizer": Sharp(ITS_PARAMETERS)},
            "Sharp evaluates the loss several times a step",
        ),
        (
            {"optimizer": Twice(ITS_PARAMETERS)},
            "Twice evaluates the loss several times a step",
        ),
        (
            {"optimizer": {"a": SGD(ITS_PARAMETERS), "b": SGD(ITS_PARAMETERS[:1])}},
            "two optimizers have weight",
        ),
        ({"data": DataLoader(DATA)}, "not a DataLoader"),
        ({"data": DATA.tensors}, r"\); give torch.utils.data.TensorDataset\("),
        ({"compile": True}, r"no effect .*: call model\.compile\(\) before the session"),
        ({"learning_rate": 0.3}, "learning_rate=0.3 has no effect in a loop of your own"),
        ({"nesterov": False}, "nesterov=False has no effect"),
        (
            {"lr_scaling": "sqrt"},
            "set the learning rate yourself, from session.global_batch",
        ),
        ({"config": (None, Config())}, "config is a tuple: give a Config"),
        ({"epoch": 3}, "unknown setting 'epoch'"),
        ({"name": 3}, "name=3 is no text"),
    ],
)
def test_what_cannot_be_trained_is_one_line(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Session(**{"model": LINEAR, "optimizer": OWN, "data": DATA, **given})
    assert not Path("runs").exists()


SMALL = {
    "epochs": 3,
    "global_batch_size": 4,
    "batch_size": 2,
    "device": "cpu",
    "workers": 0,
}


def test_an_evaluation_may_have_a_collate_of_its_own() -> None:
    """The default is that of the session."""
    data = torch.ones(8)
    measure = lambda model, batch: {"value": batch}  # noqa: E731
    doubled = lambda items: 2 * torch.stack(items)  # noqa: E731
    with Session(LINEAR, OWN, data, collate=doubled, **SMALL) as session:
        assert session.evaluate(data, measure)["value"] == 2
        plain = session.evaluate(data, measure, name="plain", collate=torch.stack)
        assert plain["value"] == 1


def test_a_set_that_is_made_for_each_evaluation_has_one_loader_process() -> None:
    processes = []

    def program(session: Session, model: nn.Module, *_: Any) -> None:
        for step in itertools.islice(session.steps(), 3):
            take(step, model)
            session.evaluate(Subset(VAL, range(step.number, step.number + 4)), measure)
            processes.append(len(multiprocessing.active_children()))

    played(LocalWorld(), program, workers=1)
    assert processes[0] > 0
    assert processes == processes[:1] * 3


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


def test_a_flag_without_effect_is_refused_with_its_default_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", "--epochs", "2", "--lr", "0.1"])
    _, config = parse_args()
    says = "learning_rate=0.1 has no effect in a loop of your own: leave it out"
    with pytest.raises(UsageError, match=says):
        Session(LINEAR, OWN, DATA, config=config.replace(epochs=3), world=LocalWorld())


@pytest.mark.parametrize(
    ("line", "expected"),
    [("", (3, 7, None)), ("--epochs 2 --seed 5 --workers 1 --resume x", (2, 5, 1))],
)
def test_a_flag_of_the_script_with_the_name_of_a_setting_sets_it_too(
    line: str,
    expected: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", *line.split()])
    parser = ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--resume", default="")
    parser.add_argument("--workers-of-mine", type=int, default=8)
    own, config = parse_args(parser, seed=7)
    assert (own.epochs, own.lr) == (expected[0], 0.3)
    assert own.workers_of_mine == 8  # --workers is not short for it
    assert (config.schedule.epochs, config.seed, config.data.workers) == expected
    assert f"a setting set it, too: epochs={own.epochs}" in capsys.readouterr().err
    assert config.run.resume == "auto"  # a text may mean something else in the script
    assert "learning_rate" not in config.given

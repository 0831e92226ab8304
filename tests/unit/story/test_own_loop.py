"""A loop of one's own has the promises of `train`: any number of ranks, stops, faults, evaluations, exact counts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import hvd_train
from hvd_train import checkpoint, handover
from hvd_train.errors import RankLost, UsageError
from hvd_train.own_loop import Session
from hvd_train.progress.order import EpochOrder
from hvd_train.result import Result
from hvd_train.run_files.ledger import audit
from hvd_train.step import Step
from hvd_train.world.world import LocalWorld
from tests.support.elastic import Event, Hosts, Kill, Unheard, run_elastic
from tests.support.own_loops import classify, digits, generate, network, score, settings_of
from tests.support.runs import NUM_SAMPLES, NUM_VAL, Weights, equal, largest_difference
from tests.support.task_runs import StopsAfter
from tests.support.worlds import Killed, run_ranks
from tests.unit.story.test_loop import records

Program = Callable[..., tuple[Result, Weights]]
TOLERANCE = 1e-5
THREE_HOSTS = (("h1", 1), ("h2", 1), ("h3", 1))


def undisturbed(program: Program, **changes: Any) -> Weights:
    """Return the weights of the program alone in its world."""
    return program(LocalWorld(), output_dir=Path("undisturbed"), resume="never", **changes)[1]


@pytest.mark.numeric
def test_the_weights_are_those_of_a_loop_in_plain_torch() -> None:
    """Alone, with one slot in each step, the same numbers come out as without a session."""
    _, weights = classify(LocalWorld(), batch_size=20, epochs=1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = digits(NUM_SAMPLES)
    order = torch.from_numpy(EpochOrder(0, 0, NUM_SAMPLES)[:])
    for rows in order.split(20):
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    assert largest_difference(weights, model.state_dict()) <= TOLERANCE


@pytest.mark.parametrize("program", [classify, generate])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_any_number_of_ranks_gives_the_same_weights(program: Program, size: int) -> None:
    """With seven ranks and five slots two ranks have nothing to compute."""
    of_ranks = run_ranks(size, lambda world: program(world))
    expected = undisturbed(program)
    for one in of_ranks:
        assert not isinstance(one, Killed)
        assert one[0].finished
        assert largest_difference(one[1], expected) <= TOLERANCE


@pytest.mark.parametrize("program", [classify, generate])
@pytest.mark.parametrize("step", [7, 10])
def test_a_stop_changes_no_bit(program: Program, step: int) -> None:
    """In mid epoch and at its end: weights, optimizers and figures go on from the commit, and the stop is an exit."""
    with pytest.raises(SystemExit) as stopped:
        program(StopsAfter(step))
    assert stopped.value.code == os.EX_TEMPFAIL
    (commit,) = checkpoint.committed(Path("run"))
    assert checkpoint.read(commit)["progress"]["step"] == step
    _, weights = program(LocalWorld())
    assert equal(weights, undisturbed(program))
    clock = dict.fromkeys(("time", "images_per_second", "seconds", "usage"), 0)
    figures = [{**line, **clock} for line in records("epoch")]
    assert figures == [{**line, **clock} for line in records("epoch", "undisturbed")]


@pytest.mark.parametrize("program", [classify, generate])
@pytest.mark.parametrize("limit", [{"max_steps": 7}, {"trial": True}, {"total_time": "0.001"}, {"max_time": "0.001"}])
def test_a_limit_ends_a_session_in_mid_epoch(program: Program, limit: dict[str, Any]) -> None:
    """With the last weights, and without scores of them, which only its program could measure."""

    def end() -> Result:
        return program(LocalWorld(), **limit)[0]

    if "max_time" in limit:
        with pytest.raises(SystemExit):
            end()
    else:
        assert end().finished
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["steps"] == {"max_steps": 7, "trial": 3}.get(next(iter(limit)), 1)
    assert (summary["finished"], summary["best_epoch"]) == ("max_time" not in limit, None)
    assert Path("run/model-final.pt").exists()


@pytest.mark.parametrize("program", [classify, generate])
@pytest.mark.parametrize(
    "events",
    [[Kill(7, rank=1)], [Kill(8, rank=0)], [Kill(20, rank=0)], [Unheard(10, 0)], [Hosts(6, THREE_HOSTS)]],
    ids=str,
)
def test_workers_that_come_and_go_change_nothing(program: Program, events: list[Event]) -> None:
    """Whichever turn of a step they break: no step is lost, each sample counts once, the weights are the same.

    The steps of two optimizers have two reductions, so a fault of an even number comes between two updates.
    """
    hosts = dict(THREE_HOSTS if isinstance(events[0], Kill) else THREE_HOSTS[:2])
    job = run_elastic(lambda world: program(world, ledger=True), hosts, events, first=len(hosts))
    assert audit(Path("run")).faults == ()
    assert len(job.sizes) > 1
    for result, weights in job.results:
        assert result.finished
        assert largest_difference(weights, undisturbed(program)) <= TOLERANCE


@pytest.mark.parametrize("program", [classify, generate])
def test_newcomers_have_all_of_a_large_state_before_they_take_part(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a program does to weights in its block could not be done to the parts of them that a newcomer has."""
    monkeypatch.setattr(handover, "AT_ONCE_BYTES", 0)
    job = run_elastic(lambda world: program(world), dict(THREE_HOSTS[:2]), [Hosts(6, THREE_HOSTS)], first=2)
    assert job.sizes == [2, 3], "with parts beside the steps they would meet once more"
    for _, weights in job.results:
        assert largest_difference(weights, undisturbed(program)) <= TOLERANCE


def test_several_turns_of_one_optimizer() -> None:
    """A critic may take several steps to one of the generator, on any number of ranks."""
    weights = run_ranks(2, lambda world: generate(world, critic_steps=3)[1])[0]
    assert not isinstance(weights, Killed)
    assert largest_difference(weights, undisturbed(generate, critic_steps=3)) <= TOLERANCE
    assert largest_difference(weights, undisturbed(generate)) > 100 * TOLERANCE


def test_a_step_that_breaks_between_two_turns_is_undone() -> None:
    """The critic was updated by then; its weights and momentum are put back, and the step comes again."""
    failed: list[int] = []

    def between(step: Step) -> None:
        if step.number == 3 and not failed:
            failed.append(step.number)
            raise RankLost("another rank is gone")

    job = run_elastic(lambda world: generate(world, between=between), {"h1": 1}, [], first=1)
    assert failed == [3]
    assert equal(job.results[0][1], undisturbed(generate))


def test_what_is_measured_is_exact_and_written_down() -> None:
    """Means over samples in training and in evaluations; the best weights are those of the best evaluation."""
    means: list[tuple[float, float]] = []

    def each(session: Session, step: Step) -> None:
        if session.place.rank == 0:
            means.append((step.mean(), step.mean("top1")))

    ((result, _), _) = run_ranks(2, lambda world: classify(world, each=each))  # type: ignore[misc]
    steps = records("step")
    assert [(line["loss"], line["top1"]) for line in steps] == means
    last = records("epoch")[-1]
    assert (last["val_loss"], last["val_top1"]) == (result.scores["loss"], result.scores["top1"])
    model = network()
    model.load_state_dict(torch.load(Path("run/model-final.pt"), weights_only=True))
    with torch.no_grad():
        scores = score(model.eval(), digits(NUM_VAL, 1000))
    assert result.scores["top1"] == scores["top1"].double().mean().item()
    assert result.scores["loss"] == pytest.approx(scores["loss"].double().mean().item(), rel=1e-6)
    assert result.best == max(line["val_top1"] for line in records("epoch"))


def test_losses_of_turns_are_figures() -> None:
    """Each by its name, and their sum as the loss; evaluations have none of them."""
    generate(LocalWorld(), epochs=1)
    line = records("step")[-1]
    assert line["loss"] == pytest.approx(line["loss_critic"] + line["loss_generator"], rel=1e-6)
    assert records("epoch")[-1]["val_loss_critic"] is None


def test_a_program_may_leave_and_go_on_later() -> None:
    """What it has done is committed; the same program takes the other steps."""

    def run(steps: int) -> Result:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with hvd_train.session(model, optimizer, digits(NUM_SAMPLES), **settings_of()) as session:
            for step in session:
                with step:
                    for slot in step:
                        slot.backward(F.cross_entropy(model(slot.data[0]), slot.data[1]))
                    step.finish()
                seen.append(step.number)
                if step.number == steps:
                    break
        return session.result

    seen: list[int] = []
    result = run(6)
    assert (result.finished, result.steps) == (False, 6)
    assert "stopped by its program at step 6, committed" in records("event")[-1]["message"]
    assert run(100).finished
    assert seen == [*range(1, 21)]


def test_a_data_set_after_training() -> None:
    """Any other set can be evaluated, after the last step as well."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    given = settings_of(epochs=1, measures=["top1"])
    with hvd_train.session(model, optimizer, digits(NUM_SAMPLES), **given) as session:
        for step in session:
            with step:
                for slot in step:
                    slot.backward(F.cross_entropy(model(slot.data[0]), slot.data[1]), top1=torch.ones(len(slot)))
                step.finish()
        scores = session.evaluate(score, digits(33, 5000))
    with torch.no_grad():
        expected = score(model.eval(), digits(33, 5000))
    assert scores.count == 33
    assert scores["top1"] == pytest.approx(expected["top1"].double().mean().item())


class Named(Dataset[dict[str, Any]]):
    """Items that are dicts, with a number that is no tensor."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": torch.full((2,), float(index)), "weight": index / 2}


class Words(Dataset[list[int]]):
    """Items of different lengths."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> list[int]:
        return [*range(index + 1)]


def pad(items: list[list[int]]) -> torch.Tensor:
    """Return the items as rows, with zeros at their ends."""
    longest = max(map(len, items))
    return torch.tensor([[*item, *[0] * (longest - len(item))] for item in items])


def seen(dataset: Any, **settings: Any) -> list[Any]:
    """Return the items of all slots of an epoch of steps of 4 samples, with the numbers of their samples."""
    model, found = nn.Linear(1, 1), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = settings_of(epochs=1, global_batch_size=4, resume="never", **settings)
    with hvd_train.session(model, optimizer, dataset, **given) as session:
        for step in session:
            with step:
                for slot in step:
                    found.append((slot.samples.tolist(), slot.data))
                    slot.backward(model(torch.ones(len(slot), 1)).squeeze(1))
                step.finish()
    return found


def test_items_of_any_structure() -> None:
    """Dicts, tuples of tensors in memory, and items that a collate of one's own joins."""
    for samples, items in seen(Named()):
        assert items["row"].tolist() == [[number, number] for number in samples]
        assert items["weight"].tolist() == [number / 2 for number in samples]
    for samples, items in seen(TensorDataset(torch.arange(12), torch.arange(12) * 2)):
        assert [tensor.tolist() for tensor in items] == [samples, [2 * number for number in samples]]
    for samples, items in seen({"x": torch.arange(12)}):
        assert items["x"].tolist() == samples
    for samples, items in seen(Words(), collate=pad):
        assert items.shape == (len(samples), max(samples) + 1)
        assert items.sum(1).tolist() == [number * (number + 1) // 2 for number in samples]


def test_learning_rates_of_groups_follow_a_schedule() -> None:
    """Each in proportion to that of the optimizer; without one they stay as they are, unless the loop sets them."""

    def rates(**settings: Any) -> list[list[float]]:
        model, found = nn.Linear(2, 1), list[list[float]]()
        groups = [{"params": [model.weight], "lr": 0.4}, {"params": [model.bias], "lr": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=0.2)
        given = settings_of(epochs=1, global_batch_size=6, resume="never", **settings)
        with hvd_train.session(model, optimizer, torch.ones(12, 2), **given) as session:
            for step in session:
                with step:
                    found.append([group["lr"] for group in optimizer.param_groups])
                    for slot in step:
                        slot.backward(model(slot.data).squeeze(1))
                    step.finish()
        return found

    assert rates() == [[0.4, 0.1]] * 2
    quarter, rest = (1 + math.cos(math.pi / 4)) / 2, (1 + math.cos(3 * math.pi / 4)) / 2
    (first, second) = rates(schedule="cosine")
    assert first == pytest.approx([0.4 * quarter, 0.1 * quarter])
    assert second == pytest.approx([0.4 * rest, 0.1 * rest])


def test_an_error_of_the_program_comes_out_of_it_as_it_is() -> None:
    """In a process alone, as without a session: nothing is printed or turned into an exit."""

    def each(session: Session, step: Step) -> None:
        if step.number == 3:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        classify(LocalWorld(), each=each)


WRONG_STEPS: dict[str, tuple[Callable[[nn.Module, Session, Step], None], str]] = {}


def wrong(message: str) -> Callable[[Callable[[nn.Module, Session, Step], None]], None]:
    """Have a body of steps be refused with this message."""

    def add(body: Callable[[nn.Module, Session, Step], None]) -> None:
        WRONG_STEPS[body.__name__] = body, message

    return add


def loss_of(model: nn.Module, slot: Any) -> torch.Tensor:
    """Return the loss of each sample."""
    return F.cross_entropy(model(slot.data[0]), slot.data[1], reduction="none")


@wrong(r"step 1 was not finished: inside `with step:` call step.finish\(\) at its end")
def not_finished(model: nn.Module, session: Session, step: Step) -> None:
    """Forget the end."""
    with step:
        for slot in step:
            slot.backward(loss_of(model, slot))


@wrong(r"step 1 was finished already: call step.finish\(\) once")
def finished_twice(model: nn.Module, session: Session, step: Step) -> None:
    """End it again."""
    with step:
        for slot in step:
            slot.backward(loss_of(model, slot))
        step.finish()
        step.finish()


@wrong("go through the slots of a step inside `with step:`")
def without_with(model: nn.Module, session: Session, step: Step) -> None:
    """Forget the block."""
    for slot in step:
        slot.backward(loss_of(model, slot))


@wrong(r"slot \d of step 1 had no slot.backward\(loss\)")
def without_backward(model: nn.Module, session: Session, step: Step) -> None:
    """Use torch's own backward pass."""
    with step:
        for slot in step:
            loss_of(model, slot).mean().backward()
        step.finish()


@wrong(r"slot \d of step 1 had two backward passes: .*; add up the losses")
def backward_twice(model: nn.Module, session: Session, step: Step) -> None:
    """Pass back twice."""
    with step:
        for slot in step:
            slot.backward(loss_of(model, slot))
            slot.backward(loss_of(model, slot))
        step.finish()


@wrong(r"step 1 was finished before all of its slots had slot.backward\(loss\)")
def left_out(model: nn.Module, session: Session, step: Step) -> None:
    """Leave slots out."""
    with step:
        for slot in step:
            slot.backward(loss_of(model, slot))
            break
        step.finish()


@wrong(r"slot.backward was given a loss of shape \[4, 10\]; give the loss of each sample, \[4\], or their mean")
def of_another_shape(model: nn.Module, session: Session, step: Step) -> None:
    """Give logits."""
    with step:
        for slot in step:
            slot.backward(model(slot.data[0]))


@wrong("the measures changed their names: first none, then top1")
def not_named(model: nn.Module, session: Session, step: Step) -> None:
    """Measure what was not named."""
    with step:
        for slot in step:
            slot.backward(loss_of(model, slot), top1=torch.ones(len(slot)))


@wrong(r"the means of step 1 are known after step.finish\(\)")
def too_early(model: nn.Module, session: Session, step: Step) -> None:
    """Ask before the end."""
    with step:
        step.mean()


@wrong("unknown measure 'top1'; known: loss|unknown measure 'top1'; did you mean")
def mean_of_nothing(model: nn.Module, session: Session, step: Step) -> None:
    """Ask for what is not measured."""
    with step:
        for slot in step:
            slot.backward(loss_of(model, slot))
        step.finish()
        step.mean("top1")


@wrong("the slots of step 1 were passed through already")
def twice_through(model: nn.Module, session: Session, step: Step) -> None:
    """Ask for the slots again."""
    with step:
        for _ in range(2):
            for slot in step:
                slot.backward(loss_of(model, slot))


@wrong("unknown optimizer 'd'")
def of_no_optimizer(model: nn.Module, session: Session, step: Step) -> None:
    """Name an optimizer where there is one."""
    with step:
        for slot in step.slots("d"):
            slot.backward(loss_of(model, slot))


@wrong("session.evaluate: there is no validation set")
def evaluated_on_nothing(model: nn.Module, session: Session, step: Step) -> None:
    """Evaluate without data."""
    with step:
        session.evaluate(score)


@wrong("session.evaluate is called inside `with step:`, or after the last step")
def evaluated_between(model: nn.Module, session: Session, step: Step) -> None:
    """Evaluate where a fault cannot be survived."""
    session.evaluate(score, digits(5))


@wrong(r"the scores must be a dict of loss, \[n\] each; got top1, loss")
def other_scores(model: nn.Module, session: Session, step: Step) -> None:
    """Score what was not named."""
    with step:
        session.evaluate(score, digits(5))


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_loop_is_one_line(name: str) -> None:
    """What was done, and what to do instead."""
    body, message = WRONG_STEPS[name]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with (  # the loop is what fails
        pytest.raises(UsageError, match=message),
        hvd_train.session(model, optimizer, digits(NUM_SAMPLES), **settings_of()) as session,
    ):
        for step in session:
            body(model, session, step)


def test_what_can_be_asked_before_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The device, the place, and a line for the user; an evaluation has to wait."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with (
        pytest.raises(UsageError, match=r"session\.evaluate is called inside `with step:`, or after the last step"),
        hvd_train.session(model, optimizer, digits(NUM_SAMPLES), **settings_of()) as session,
    ):
        session.say("hello")
        assert (session.place.size, session.device.type) == (1, next(model.parameters()).device.type)
        session.evaluate(score, digits(5))
    assert "hello" in capsys.readouterr().err


class Endless(IterableDataset[int]):
    """Data without numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": DataLoader(Named())}, "the training set is a DataLoader; return its `dataset`"),
        ({"dataset": Endless()}, "the training set is a Endless, whose items have no numbers"),
        ({"dataset": torch.ones(0, 2)}, "the training set is empty"),
        ({"dataset": (torch.ones(3), torch.ones(4))}, "the training set has tensors of 3 and of 4 rows"),
        ({"validation": 5}, "the validation set is a int, whose items have no numbers"),
        ({"optimizer": 5}, "session: the optimizer is a int, and none of torch.optim"),
        ({"optimizer": {}}, "session: there is no optimizer"),
        ({"optimizer": {"a b": torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)}}, "an optimizer is called 'a b'"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)}, "parameters that are not of the model"),
        ({"learning_rate": 0.1}, "session: learning_rate is no setting of a session: the optimizer has it"),
        ({"recheck_steps": 9}, "session: recheck_steps is no setting of a session"),
        ({"mixup": 0.2}, "session: mixup is no setting of a session"),
        ({"target": "top1=0.9", "validation": torch.ones(3, 2)}, "--target top1=0.9: top1 is no figure of the task"),
        ({"patience": 2}, "--target-accuracy, --target and --patience need a validation set"),
        ({"batch_sice": 4}, "unknown setting 'batch_sice'; did you mean 'batch_size'"),
        ({"best": "top1"}, "top1 is no figure of the task"),
        ({"measures": ["top1"], "best": "top1"}, "top1 has no order: say which values are better"),
        ({"measures": ["val_a"]}, "a figure of the task is called 'val_a', which records use already"),
        ({"epochs": 0}, "--epochs is 0"),
        ({"epochs": "3"}, "session: epochs is '3'; it must be a whole number"),
    ],
)
def test_a_wrong_session_is_one_line(changes: dict[str, Any], message: str) -> None:
    """Before a folder is made or a step is taken."""
    model = nn.Linear(2, 1)
    given: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "dataset": torch.ones(12, 2)}
    given |= {**settings_of(), **changes}
    with pytest.raises(UsageError, match=message), hvd_train.session(model, **given):
        pass
    assert not Path("run").exists()


def test_a_single_optimizer_may_have_a_name() -> None:
    """It has its turn by that, and its loss is one of the figures."""
    model = nn.Linear(2, 1)
    optimizers = {"only": torch.optim.SGD(model.parameters(), lr=0.1)}
    with hvd_train.session(model, optimizers, torch.ones(12, 2), **settings_of(global_batch_size=4)) as session:
        for step in session:
            with step:
                for slot in step.slots("only"):
                    slot.backward(model(slot.data).squeeze(1))
                step.finish("only")
    assert session.result.finished
    assert records("step")[-1]["loss_only"] == records("step")[-1]["loss"]


def test_optimizers_with_the_same_parameters_are_refused() -> None:
    """Their updates would undo each other."""
    model = nn.Linear(2, 1)
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name in ("a", "b")}
    with (
        pytest.raises(UsageError, match="the optimizers a, b share parameters"),
        hvd_train.session(model, optimizers, torch.ones(12, 2), **settings_of()),
    ):
        pass

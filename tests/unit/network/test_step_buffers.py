"""What a step makes of buffers: running statistics move by a mean over slots, others have the value of slot 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hvd_train.network.step_buffers import StepBuffers
from hvd_train.world.world import LocalWorld, World
from tests.support.worlds import ThreadWorld, run_ranks

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
SLOTS = [torch.sin(torch.arange(12.0).view(4, 3) * (n + 1)) for n in range(5)]


def stepped(
    world: World, model: nn.Module, slots: list[Tensor], *, undo: bool = False, patterns: tuple[str, ...] = ()
) -> None:
    """The forward passes of one step on this rank."""
    take(world, StepBuffers(model, CPU, patterns), model, slots, undo=undo)


def take(world: World, buffers: StepBuffers, model: nn.Module, slots: list[Tensor], *, undo: bool = False) -> int:
    """The passes of a step on this rank, as `Step` has them; the numbers that have travelled with it."""
    buffers.begin()
    for number, slot in list(enumerate(slots))[world.place.rank :: world.place.size]:
        buffers.begin_slot()
        model(slot).square().sum().backward()
        buffers.end_slot(number)
    total = world.sum(torch.cat([torch.tensor([float(buffers.has_news)]), *buffers.changes]), "changes")
    if undo:
        buffers.undo()
        return 0
    if total[0] > 0:
        buffers.exchange_news(world)
    buffers.finish(total[1:], len(slots))
    return len(total) - 1


def started() -> nn.BatchNorm1d:
    """A layer with statistics of its own."""
    layer = nn.BatchNorm1d(3, momentum=0.1)
    layer.running_mean.copy_(torch.tensor([1.0, -2.0, 0.5]))
    layer.running_var.copy_(torch.tensor([0.5, 1.0, 2.0]))
    return layer


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_statistics_move_by_the_mean_over_slots(size: int) -> None:
    """By hand: 0.9 of the old value and 0.1 of the mean of the slots' own, whatever the number of ranks."""

    def body(world: ThreadWorld) -> dict[str, Tensor]:
        layer = started()
        stepped(world, layer, SLOTS)
        return layer.state_dict()

    mean = torch.stack([slot.mean(0) for slot in SLOTS]).mean(0)
    var = torch.stack([slot.var(0) for slot in SLOTS]).mean(0)
    for state in run_ranks(size, body):
        torch.testing.assert_close(state["running_mean"], 0.9 * started().running_mean + 0.1 * mean)
        torch.testing.assert_close(state["running_var"], 0.9 * started().running_var + 0.1 * var)
        assert state["num_batches_tracked"] == 1


def test_one_slot_is_what_torch_does() -> None:
    """With a single slot the layer ends as if nobody had watched it."""
    mine, plain = started(), started()
    stepped(LocalWorld(), mine, SLOTS[:1])
    plain(SLOTS[0])
    torch.testing.assert_close(mine.running_mean, plain.running_mean)
    torch.testing.assert_close(mine.running_var, plain.running_var)


def test_a_frozen_layer_stays_as_it_was_to_the_last_bit() -> None:
    """In evaluation mode nothing changes, whatever the values are."""
    layer = started()
    layer.running_mean.copy_(torch.tensor([1 / 3, 1e-30, 1e30]))
    before = layer.running_mean.clone()
    stepped(LocalWorld(), layer.eval(), SLOTS)
    assert torch.equal(layer.running_mean, before)
    assert layer.num_batches_tracked == 0


def test_a_broken_step_is_undone() -> None:
    """Back to the statistics with which the step began."""
    layer = started()
    stepped(LocalWorld(), layer, SLOTS, undo=True)
    assert torch.equal(layer.running_mean, started().running_mean)
    assert torch.equal(layer.running_var, started().running_var)
    assert layer.num_batches_tracked == 0


def test_a_model_without_such_layers_has_nothing_to_exchange() -> None:
    """No number travels for nothing."""
    stepped(LocalWorld(), nn.Linear(3, 3), SLOTS)
    assert StepBuffers(nn.Linear(3, 3), CPU).changes == []


class Noted(nn.Module):
    """Passes its input on, and lets a function of the test change its buffer `held` in each pass."""

    def __init__(self, start: Tensor, change: Callable[[Noted, Tensor], None], *, persistent: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("held", start.clone(), persistent=persistent)
        self.held: Tensor
        self.change, self.before = change, list[Tensor]()

    def forward(self, values: Tensor) -> Tensor:
        """Return the values times the weight."""
        self.before.append(self.held.clone())
        self.change(self, values)
        return values * self.weight


def assigns(module: Noted, values: Tensor) -> None:
    """Puts a new tensor in the place of the buffer, with a graph, as many do by mistake."""
    module.held = 0.9 * module.held + (values * module.weight).mean(0)


def writes(module: Noted, values: Tensor) -> None:
    """Writes into the tensor."""
    module.held += (values.sum() * 100).to(module.held.dtype)


def writes_unseen(module: Noted, values: Tensor) -> None:
    """Writes into the tensor behind the back of autograd and its counter of versions."""
    module.held.data.add_(values.sum())


def draws(module: Noted, values: Tensor) -> None:
    """Keeps the state of a generator."""
    generator = torch.Generator()
    generator.set_state(module.held)
    torch.rand(int(values.abs().sum()), generator=generator)
    module.held = generator.get_state()


def flips(module: Noted, values: Tensor) -> None:
    """Sets a flag."""
    module.held.logical_not_()


def grows(module: Noted, values: Tensor) -> None:
    """Gets longer with each pass."""
    module.held = torch.cat([module.held, values.sum().view(1)])


def fills(module: Noted, values: Tensor) -> None:
    """Sets one entry of a row that is the same memory again and again."""
    module.held = module.held + values.sum()


BUFFERS: dict[str, tuple[Tensor, Callable[[Noted, Tensor], None]]] = {
    "a mean, assigned": (torch.tensor([1.0, -0.0, 1e-40]), assigns),
    "a sum, written": (torch.tensor(1e-30), writes),
    "written by way of data": (torch.zeros(2), writes_unseen),
    "float64": (torch.tensor([1 / 3], dtype=torch.float64), writes),
    "bfloat16": (torch.ones(3, dtype=torch.bfloat16), writes),
    "complex": (torch.ones(2, dtype=torch.complex64), writes),
    "a counter beyond 2^53": (torch.tensor(2**60 + 1), writes),
    "int32": (torch.tensor([2**30 + 1], dtype=torch.int32), writes),
    "a flag": (torch.tensor(False), flips),
    "the state of a generator": (torch.Generator().manual_seed(3).get_state(), draws),
    "not a number": (torch.tensor([torch.nan, torch.inf]), writes),
    "of another shape each time": (torch.zeros(1), grows),
    "expanded": (torch.zeros(1).expand(3), fills),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_has_the_value_of_slot_0(name: str) -> None:
    """To the last bit, after each of three steps on any number of ranks; each slot begins with the step's value."""
    start, change = BUFFERS[name]

    def body(world: World) -> list[Tensor]:
        model = Noted(start, change)
        buffers = StepBuffers(model, CPU)
        values = []
        for step in range(3):
            begun = model.held.detach().clone()
            take(world, buffers, model, [slot + step for slot in SLOTS])
            assert all(same(value, begun) for value in model.before)
            model.before.clear()
            values.append(model.held.detach().clone())
        return values

    alone = Noted(start, change)
    expected = []
    for step in range(3):
        alone(SLOTS[0] + step)
        alone.held = alone.held.detach()
        expected.append(alone.held.clone())
    for size in (1, 2, 3):
        for values in run_ranks(size, body):
            assert all(same(value, other) for value, other in zip(values, expected, strict=True)), (values, expected)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal as numbers (0 is -0), where not a number is itself."""
    return torch.equal(one, other) or (
        one.is_floating_point() and one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)
    )


def test_what_never_changes_does_not_travel() -> None:
    """What has changed once travels with each message from then on, and nothing else does."""

    def body(world: ThreadWorld) -> list[int]:
        model = nn.Sequential(Noted(torch.zeros(1000), lambda *_: None), late := Noted(torch.zeros(3), lambda *_: None))
        buffers = StepBuffers(model, CPU)
        sizes = [take(world, buffers, model, SLOTS) for _ in range(2)]
        late.change = assigns
        return [*sizes, *(take(world, buffers, model, SLOTS) for _ in range(2))]

    assert run_ranks(2, body) == [[0, 0, 0, 3]] * 2


@pytest.mark.parametrize("change", [assigns, writes, writes_unseen])
@pytest.mark.parametrize("steps", [0, 1])
def test_other_buffers_of_a_broken_step_are_put_back(steps: int, change: Callable[[Noted, Tensor], None]) -> None:
    """The tensor that was there is there again, with what it held, in the first step of a world and later."""
    model = Noted(torch.ones(3), change)
    buffers = StepBuffers(model, CPU)
    for _ in range(steps):
        take(LocalWorld(), buffers, model, SLOTS)
    before, value = model.held, model.held.clone()
    take(LocalWorld(), buffers, model, SLOTS, undo=True)
    assert model.held is before
    assert torch.equal(before, value)


def test_a_change_that_is_not_of_slot_0_does_not_count() -> None:
    """Alone and on ranks: what another slot alone makes of a buffer is gone after the step."""

    def sets(module: Noted, values: Tensor) -> None:
        if torch.equal(values, SLOTS[1]):
            module.held += 1

    def body(world: ThreadWorld) -> Tensor:
        model = Noted(torch.zeros(3), sets)
        buffers = StepBuffers(model, CPU)
        for _ in range(2):
            take(world, buffers, model, SLOTS)
        return model.held

    assert all(torch.equal(held, torch.zeros(3)) for size in (1, 2) for held in run_ranks(size, body))


def test_changes_that_nobody_has_seen_are_brought_together() -> None:
    """A pass that begins to write by way of `data` later on: rank 0's values, and from then on those of slot 0."""

    def body(world: ThreadWorld) -> list[Tensor]:
        model = Noted(torch.zeros(2), lambda *_: None)
        buffers = StepBuffers(model, CPU)
        take(world, buffers, model, SLOTS)
        model.change = writes_unseen
        take(world, buffers, model, SLOTS)
        apart = model.held.clone()
        buffers.bring_together(world)
        together = model.held.clone()
        take(world, buffers, model, SLOTS)
        return [apart, together, model.held]

    first, second = run_ranks(2, body)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(second[1], first[0])
    assert torch.equal(second[2], first[0] + SLOTS[0].sum())
    assert torch.equal(second[2], first[2])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_mean_over_slots_by_name(size: int) -> None:
    """`--average-buffers`: a running mean of the user's own moves as batch norm's does, assigned or not."""

    def body(world: ThreadWorld) -> Tensor:
        model = nn.Sequential(Noted(torch.ones(3), assigns), Noted(torch.tensor(5), writes))
        stepped(world, model, SLOTS, patterns=("0.h*",))
        return torch.cat([model[0].held, model[1].held.view(1)])

    mean = torch.stack([slot.mean(0) for slot in SLOTS]).mean(0)
    for held in run_ranks(size, body):
        torch.testing.assert_close(held[:3], 0.9 + mean)
        assert held[3] == 5 + int(SLOTS[0].sum() * 100)


def test_a_mean_of_counts_is_rounded_and_one_of_numbers_is_not() -> None:
    """Integers of the user's own move by the mean to the nearest number, beside floats that move by the mean itself."""

    def counts(module: Noted, values: Tensor) -> None:
        module.held += 2 if torch.equal(values, SLOTS[0]) else 3

    model = nn.Sequential(Noted(torch.tensor([5, 7]), counts), Noted(torch.zeros(1), counts))
    stepped(LocalWorld(), model, SLOTS[:3], patterns=("*.held",))
    assert model[0].held.tolist() == [8, 10]
    assert torch.equal(model[1].held, torch.tensor([8.0]) / 3)


def test_nothing_is_undone_before_a_step_begins_or_after_it_is_taken() -> None:
    """A fault between two steps leaves what a step has made, and what was loaded since."""
    model = nn.Sequential(started(), Noted(torch.ones(3), writes))
    buffers = StepBuffers(model, CPU)
    buffers.undo()
    assert torch.equal(model[0].running_mean, started().running_mean)
    take(LocalWorld(), buffers, model, SLOTS)
    model[0].running_mean.fill_(7.0)
    model[1].held.fill_(8.0)
    buffers.undo()
    assert model[0].running_mean.tolist() == [7.0] * 3
    assert model[1].held.tolist() == [8.0] * 3


def test_only_slot_0_has_news_of_a_buffer_and_only_once() -> None:
    """The first change is news to the other ranks; later ones travel with the message, and a new step knows none."""
    model = Noted(torch.zeros(2), writes)
    buffers = StepBuffers(model, CPU)
    seen = []
    for number in (1, 0):
        buffers.begin()
        buffers.begin_slot()
        model(SLOTS[number])
        buffers.end_slot(number)
        seen.append(buffers.has_news)
    assert seen == [False, True]
    buffers.exchange_news(LocalWorld())
    buffers.finish(torch.cat(buffers.changes), 1)
    buffers.begin()
    assert not buffers.has_news
    assert [change.tolist() for change in buffers.changes] == [[0.0, 0.0]]
    model(SLOTS[0])
    buffers.end_slot(0)
    assert not buffers.has_news
    assert torch.equal(buffers.changes[0], model.held)


def test_buffers_are_not_brought_together_before_the_first_step() -> None:
    """There is nothing that the ranks could have seen or missed yet, and they exchange nothing."""

    class Silent(LocalWorld):
        def gather(self, value: object) -> list[object]:  # type: ignore[override]
            raise AssertionError("nothing is to be told")

    model = Noted(torch.zeros(2), writes)
    buffers = StepBuffers(model, CPU)
    buffers.begin()
    model(SLOTS[0])
    buffers.bring_together(Silent())
    assert torch.equal(model.held, torch.zeros(2) + SLOTS[0].sum() * 100)


def test_numbers_of_eight_bits_travel_as_they_are() -> None:
    """An odd count of them as well, which no pieces of 16 bits would hold."""

    def halves(module: Noted, values: Tensor) -> None:
        module.held = (module.held.float() / 2 + values.mean(0)).to(module.held.dtype)

    start = torch.ones(3, dtype=torch.float8_e4m3fn)
    model, alone = Noted(start, halves), Noted(start, halves)
    buffers = StepBuffers(model, CPU)
    for _ in range(3):
        take(LocalWorld(), buffers, model, SLOTS)
        alone(SLOTS[0])
        assert torch.equal(model.held.view(torch.uint8), alone.held.view(torch.uint8))


def test_what_travels_is_where_the_model_is() -> None:
    """Whatever torch's default device is, from the first step on."""
    model = nn.Sequential(started(), Noted(torch.tensor(2**60 + 1), writes), Noted(torch.ones(3), assigns))
    with torch.device("meta"):
        buffers = StepBuffers(model, CPU, ("2.*",))
        for _ in range(2):
            buffers.begin()
            buffers.begin_slot()
            model(SLOTS[0]).square().sum().backward()
            buffers.end_slot(0)
            if buffers.has_news:
                buffers.exchange_news(LocalWorld())
            buffers.finish(torch.cat(buffers.changes), 1)
        buffers.begin()
    assert {change.device.type for change in buffers.changes} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}

"""One optimizer step, against torch by hand."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_train import Config
from hvd_train.data.batches import Batch, MicroBatch
from hvd_train.errors import RankLost, UsageError
from hvd_train.progress.fingerprint import fingerprint
from hvd_train.progress.order import Cut
from hvd_train.state import TrainState, to_host
from hvd_train.step import StepResult, Votes
from hvd_train.tasks.meter import Meter
from hvd_train.tasks.task import Task
from hvd_train.world.world import LocalWorld, PendingSum, Reduction, World
from tests.support import runs
from tests.support.batches import batch_of
from tests.support.runs import equal
from tests.support.steps import TaskSteps
from tests.support.tasks import meter_of_classes
from tests.support.worlds import ThreadWorld, own_generator, run_ranks

pytestmark = pytest.mark.numeric

T = TypeVar("T")

CPU = torch.device("cpu")


# Steps are compared in float64: each number of one is made by fewer than a thousand additions of numbers of magnitudes
# up to 10, and another order of them, on another processor, changes it by less than 1000 * 10 * 2**-53.
ROUNDINGS = 1.2e-12
# A gradient is clipped, to the norm 0.1 here, by a factor in float32, and moves the weights by a tenth of itself.
CLIPPED = ROUNDINGS + 0.1 * 0.1 * 2**-23


class InDoublePrecision(nn.Module):
    """A convolutional network in float64, which takes images in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = own_generator(runs.convnet(10)).double()

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.body(images.double())
        return logits


def images(count: int) -> tuple[Tensor, Tensor]:
    """Made-up images and labels."""
    return torch.cos(torch.arange(count * 64.0).view(count, 1, 8, 8)), torch.arange(count) % 10


def batch(count: int, micro: int, rank: int = 0, size: int = 1) -> Batch:
    """A rank's part of a global batch of `count`."""
    inputs, targets = images(count)
    slots = list(zip(inputs.split(micro), targets.split(micro), strict=True))
    mine = [MicroBatch(n, *slots[n], np.arange(len(slots[n][1]))) for n in range(rank, len(slots), size)]
    return batch_of(count, len(slots), *mine)


def state_of(
    world: World, model: nn.Module, *, scale: float | None = None, wire: torch.dtype | None = None
) -> TrainState:
    """A state with SGD."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    scaler.scale(torch.ones(()))
    optimizer = world.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, Reduction(wire=wire))
    return TrainState(model, optimizer, scaler, Cut(8, 4))


def take(config: Config, world: World, state: TrainState, part: Batch, *, norm: bool = False) -> StepResult:
    """One step without a wish."""
    return TaskSteps(config, world, state.model, CPU, meter_of_classes()).take(state, part, Votes(), want_norm=norm)


def by_hand(count: int, clip: float | None = None) -> tuple[nn.Module, float]:
    """The same step written with torch alone; the gradient's norm."""
    model = InDoublePrecision()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = images(count)
    F.cross_entropy(model(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
    optimizer.step()
    return model, float(norm)


@pytest.mark.parametrize("clip", [None, 0.1, 1000.0])
@pytest.mark.parametrize("micro", [8, 3, 1])
def test_a_step_is_the_one_torch_takes(micro: int, clip: float | None) -> None:
    """Accumulated or not, clipped or not, the weights are those of one large batch and of torch's clipping."""
    model = InDoublePrecision()
    state = state_of(LocalWorld(), model)
    result = take(Config().replace(clip_norm=clip), LocalWorld(), state, batch(8, micro), norm=True)
    expected, norm = by_hand(8, clip)
    allowed = CLIPPED if clip == 0.1 else ROUNDINGS
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=allowed)
    assert result.gradient_norm == pytest.approx(norm, rel=ROUNDINGS)


def test_a_step_counts_losses_and_hits() -> None:
    """The sums are those of the weights before the step, over the whole batch."""
    model = InDoublePrecision()
    inputs, targets = images(8)
    with torch.no_grad():
        logits = model(inputs)
    result = take(Config(), LocalWorld(), state_of(LocalWorld(), model), batch(8, 3))
    assert result.totals.count == 8
    assert result.totals.loss == pytest.approx(F.cross_entropy(logits, targets, reduction="sum").item(), rel=1e-5)
    assert result.totals.sums[1] == (logits.argmax(1) == targets).sum().item()
    assert result.gradient_norm is None


def test_something_can_be_done_while_gradients_travel() -> None:
    """After the last backward pass, before anything has changed: here, with two ranks, before the sums are known."""

    def body(world: ThreadWorld) -> None:
        model = own_generator(runs.convnet(10))
        before = to_host(model.state_dict())
        seen = []

        def meanwhile() -> None:
            assert all(parameter.grad is not None for parameter in model.parameters())
            assert equal(to_host(model.state_dict()), before)
            seen.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])

        part, state = batch(8, 4, world.place.rank, 2), state_of(world, model)
        TaskSteps(Config(), world, model, CPU, meter_of_classes()).take(
            state, part, Votes(), want_norm=False, meanwhile=meanwhile
        )
        (mine,) = seen
        sums = [parameter.grad for parameter in model.parameters()]
        assert not any(torch.equal(one, both) for one, both in zip(mine, sums, strict=True))
        assert not equal(to_host(model.state_dict()), before)

    run_ranks(2, body)


@pytest.mark.parametrize("wire", [None, torch.float16, torch.bfloat16])
def test_ranks_without_a_slot_take_part(wire: torch.dtype | None) -> None:
    """Two slots on three ranks: the third has none and takes the same step, also with fp16 or bf16 on the wire."""

    def body(world: ThreadWorld) -> dict[str, Tensor]:
        model = InDoublePrecision()
        state = state_of(world, model, scale=1024.0 if wire == torch.float16 else None, wire=wire)
        take(Config(), world, state, batch(8, 4, world.place.rank, 3))
        return dict(model.state_dict())

    first, *others = run_ranks(3, body)
    assert all(equal(first, other) for other in others)
    expected = by_hand(8)[0].state_dict()
    for name, tensor in expected.items():
        # A rounding on each of two ranks that have slots, and two of additions; gradients are below 1, and lr is 0.1.
        allowed = ROUNDINGS if wire is None else 0.1 * 4 * torch.finfo(wire).eps / 2
        torch.testing.assert_close(first[name], tensor, rtol=0, atol=allowed)


def test_small_gradients_survive_a_half_precision_wire() -> None:
    """Gradients below the range of fp16 are lost without a loss scale, and kept with one; bf16 needs none."""

    def moved(scale: float | None, wire: torch.dtype = torch.float16) -> float:
        def body(world: ThreadWorld) -> float:
            model = nn.Linear(1, 2, bias=False)
            nn.init.zeros_(model.weight)
            state = state_of(world, model, scale=scale, wire=wire)
            tiny = MicroBatch(world.place.rank, torch.full((1, 1), 1e-8), torch.tensor([0]), np.arange(1))
            take(Config(), world, state, batch_of(2, 2, tiny))
            return float(model.weight.detach().abs().sum())

        return run_ranks(2, body)[0]

    assert moved(None) == 0.0
    assert moved(1024.0) == pytest.approx(1e-9, rel=1e-2)
    assert moved(None, torch.bfloat16) == pytest.approx(1e-9, rel=1e-2)


def test_an_overflow_on_the_wire_skips_the_step_on_every_rank() -> None:
    """Where one rank's gradient overflows, no rank steps, and every scale halves."""

    def body(world: ThreadWorld) -> tuple[bool, float, bool]:
        model = own_generator(runs.convnet(10))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state = state_of(world, model, scale=2.0**40, wire=torch.float16)
        part = batch(4, 4, world.place.rank, 2)  # one slot: the second rank has nothing that could overflow
        take(Config(), world, state, part)
        skipped, scale = equal(before, dict(model.state_dict())), state.scaler.get_scale()
        for _ in range(40):
            take(Config(), world, state, part)
        return skipped, scale, equal(before, dict(model.state_dict()))

    assert run_ranks(2, body) == [(True, 2.0**39, False)] * 2


@pytest.mark.parametrize("make", [runs.convnet, runs.batch_norm])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_runs_and_keeps_weights_in_fp32(precision: str, make: object) -> None:
    """The arithmetic is half precision, the weights are not, and the step is near the exact one."""
    config = Config().replace(precision=precision)
    model = own_generator(make(10))  # type: ignore[operator]
    seen = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    state = state_of(LocalWorld(), model, scale=128.0 if precision == "fp16" else None)
    result = take(config, LocalWorld(), state, batch(8, 4))
    assert set(seen) == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
    exact = own_generator(make(10))  # type: ignore[operator]
    plain = take(Config(), LocalWorld(), state_of(LocalWorld(), exact), batch(8, 4))
    assert result.totals.loss == pytest.approx(plain.totals.loss, rel=0.02)


@pytest.mark.parametrize("wish", [Votes(), Votes(stop=True), Votes(commit=True), Votes(change=True), Votes(True, True)])
def test_a_wish_of_any_rank_is_the_wish_of_all(wish: Votes) -> None:
    """One rank of three wishes; all learn the same."""

    def body(world: ThreadWorld) -> Votes:
        model = own_generator(runs.convnet(10))
        step = TaskSteps(Config(), world, model, CPU, meter_of_classes())
        mine = wish if world.place.rank == 1 else Votes()
        return step.take(state_of(world, model), batch(8, 4, world.place.rank, 3), mine, want_norm=False).agreed

    assert run_ranks(3, body) == [wish] * 3


@pytest.mark.parametrize("make", [runs.convnet, runs.batch_norm])
def test_all_ranks_know_what_all_have_taken(make: object) -> None:
    """Where the run keeps a ledger, the fingerprint of all samples comes with the gradients, also to an idle rank."""

    def body(world: ThreadWorld, *, ledger: bool) -> int | None:
        model = own_generator(make(10))  # type: ignore[operator]
        part = batch(8, 4, world.place.rank, 3)
        return take(Config().replace(ledger=ledger), world, state_of(world, model), part).fingerprint

    assert run_ranks(3, lambda world: body(world, ledger=True)) == [fingerprint(np.array([0, 1, 2, 3] * 2))] * 3
    assert run_ranks(3, lambda world: body(world, ledger=False)) == [None] * 3


def test_dropout_belongs_to_the_slot() -> None:
    """The same step with the same slots drops the same units; the next step drops others."""

    def masks(micro: int) -> list[Tensor]:
        model = own_generator(runs.dropout(10))
        seen: list[Tensor] = []
        model[3].register_forward_hook(lambda module, inputs, output: seen.append((output == 0).float()))
        state = state_of(LocalWorld(), model)
        for _ in range(2):
            torch.rand(3)  # others draw too
            take(Config().replace(learning_rate=1e-30), LocalWorld(), state, batch(8, micro))
            state.progress = state.progress.after_step(8)
        return seen

    first, again = masks(4), masks(4)
    assert len(first) == 4
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[2])


def test_a_lost_rank_leaves_the_state_of_the_step_before() -> None:
    """The fault comes before a weight has changed, and running statistics go back to how the step began."""

    class Breaks(LocalWorld):
        def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
            def fail() -> Tensor:
                raise RankLost("gone")

            return fail

    model = own_generator(runs.batch_norm(10))
    state = state_of(LocalWorld(), model)
    take(Config(), LocalWorld(), state, batch(8, 4))
    before = state.digest()
    with pytest.raises(RankLost, match="gone"):
        take(Config(), Breaks(), state, batch(8, 4))
    assert state.digest() == before


def test_a_rank_lost_in_the_last_exchange_of_a_step() -> None:
    """The step after it can be taken: what loss scaling has begun is not begun twice."""

    class LosesOne(LocalWorld):
        """Loses a rank while the sums of the first step are on their way."""

        lost = False

        def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
            if name == "step" and not self.lost:
                self.lost = True
                return self._lose
            return super().start_sum(tensor, name)

        def _lose(self) -> Tensor:
            raise RankLost("rank 1")

    world, model = LosesOne(), own_generator(runs.batch_norm(10))
    state = state_of(world, model, scale=1024.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RankLost):
        take(Config(), world, state, batch(8, 4))
    assert runs.equal(before, dict(model.state_dict()))
    assert not take(Config(), world, state, batch(8, 4)).skipped
    assert not runs.equal(before, dict(model.state_dict()))


def test_a_rank_lost_in_an_exchange_about_buffers() -> None:
    """Gradients are unscaled by then; the step after it can be taken, with the same scale."""

    class LosesOne(LocalWorld):
        """Loses a rank in the first exchange."""

        lost = False

        def gather(self, value: T) -> list[T]:
            if not self.lost:
                self.lost = True
                raise RankLost("rank 1")
            return super().gather(value)

    world, model = LosesOne(), own_generator(runs.remembers(10))
    state = state_of(world, model, scale=1024.0)
    before = state.digest()
    with pytest.raises(RankLost):
        take(Config(), world, state, batch(8, 4))
    assert (state.digest(), state.scaler.get_scale()) == (before, 1024.0)
    assert not take(Config(), world, state, batch(8, 4)).skipped
    assert state.digest() != before


def test_a_step_that_ends_the_training_leaves_the_buffers_of_the_step_before() -> None:
    """The state is committed then, and must be that of a whole number of steps."""

    def measures(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"broken": torch.full((len(targets),), value)}

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="none")

    value = 1.0
    model, (inputs, targets) = own_generator(runs.batch_norm(10)), images(8)
    meter = Meter.of(Task(loss=loss, measures=measures), model(inputs), targets, 8)
    value, world = float("nan"), LocalWorld()
    state, before = state_of(world, model), to_host(model.state_dict())
    with pytest.raises(UsageError, match="step 1: the task's measure broken is not finite"):
        TaskSteps(Config(), world, model, CPU, meter).take(state, batch(8, 4), Votes(), want_norm=False)
    assert equal(to_host(model.state_dict()), before)

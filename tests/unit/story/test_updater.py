"""One optimizer step, against plain torch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_train import Config
from hvd_train.errors import UsageError
from hvd_train.progress.order import Batch, BatchLayout, MicroBatch, fingerprint
from hvd_train.state import Answer, TrainState
from hvd_train.updater import Updater, Votes
from hvd_train.world.world import Gradients, LocalWorld, World
from tests.support import runs
from tests.support.worlds import ThreadWorld, own_generator, run_ranks

CPU = torch.device("cpu")

# In float64: fewer than 1000 additions of numbers up to 10, in another order, differ by less than
# 1000 * 10 * 2**-53.
ROUNDINGS = 1.2e-12
# The factor that clips to the norm 0.1 is in float32; a tenth of the gradient moves the weights.
CLIPPED = ROUNDINGS + 0.1 * 0.1 * 2**-23


class InDoublePrecision(nn.Module):
    """A convolutional network in float64, for images in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = own_generator(runs.convnet(10)).double()

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images.double())


INPUTS = torch.cos(torch.arange(8 * 64.0).view(8, 1, 8, 8))
TARGETS = torch.arange(8)


def batch(micro: int, rank: int = 0, size: int = 1) -> Batch:
    parts = list(zip(INPUTS.split(micro), TARGETS.split(micro), strict=True))
    mine = tuple(
        MicroBatch(n, np.arange(len(parts[n][1])), parts[n]) for n in range(rank, len(parts), size)
    )
    return Batch(8, len(parts), mine)


def state_of(
    model: nn.Module, scale: float | None = None, world: World | None = None
) -> TrainState:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    scaler.scale(torch.ones(()))
    (world or LocalWorld()).wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainState(model, {"": optimizer}, scaler, BatchLayout(8, 4))


def take(config: Config, state: TrainState, part: Batch) -> Answer:
    return Updater(config, LocalWorld(), state.model, CPU, {"": runs.TRAINING}).take(state, part)


@pytest.mark.parametrize(
    ("micro", "clip", "scale"),
    [
        (8, None, None),
        (3, None, None),
        (1, 1000.0, None),
        (3, 0.1, None),
        (8, 0.1, 1024.0),
        (8, 0.1, 65536.0),
    ],
)
def test_a_step_equals_plain_torch(micro: int, clip: float | None, scale: float | None) -> None:
    """Accumulated, clipped, scaled, and with an unused weight; the sums are
    of the weights before it.
    """
    model = InDoublePrecision()
    by_hand = InDoublePrecision()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    logits = by_hand(INPUTS)
    F.cross_entropy(logits, TARGETS).backward()
    norm = nn.utils.clip_grad_norm_(by_hand.parameters(), clip or float("inf"))
    optimizer.step()
    model.unused = nn.Parameter(torch.ones(3))
    result = take(Config().replace(clip_norm=clip), state_of(model, scale), batch(micro))
    allowed = CLIPPED if clip == 0.1 else ROUNDINGS
    for name, tensor in by_hand.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=allowed)
    assert result.gradient_norm == pytest.approx(float(norm), rel=ROUNDINGS)
    assert torch.equal(model.unused, torch.ones(3))
    assert result.totals.count == 8
    loss = F.cross_entropy(logits, TARGETS, reduction="sum").item()
    assert result.totals.sums["loss"] == pytest.approx(loss, rel=1e-5)
    assert result.totals.sums["top1"] == (logits.argmax(1) == TARGETS).sum().item()


class LargeLayer(nn.Module):
    """One large weight whose gradient has 64 elements of 2^12 and 2^24 of 1, times the
    label's part in the loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 2**18 + 1))
        self.gradient = torch.ones_like(self.weight)
        self.gradient.view(-1)[:64] = 2.0**12

    def forward(self, images: Tensor) -> Tensor:
        logit = (self.weight * self.gradient).sum()
        return torch.cat((logit.view(1), torch.zeros(9))).expand(len(images), 10)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            "4 .*: type --batch-size 2 --accumulation-steps 4",
        ),
        (
            RuntimeError("pool_cuda does not have a deterministic implementation"),
            "--deterministic: pool_cuda has no",
        ),
    ],
)
def test_what_the_settings_ask_too_much_is_one_line(error: Exception, says: str) -> None:
    model = own_generator(runs.convnet(10))
    model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(UsageError, match=says):
        take(Config(), state_of(model), batch(4))


def test_the_norm_of_a_large_gradient_is_accurate() -> None:
    """One float32 sum of squares would lose all ones next to 2^24: 0.8% of the norm."""
    part = Batch(
        4, 1, (MicroBatch(0, np.arange(4), (INPUTS[:4], torch.ones(4, dtype=torch.long))),)
    )
    result = take(Config(), state_of(LargeLayer()), part)
    ones = 64 * 2**18
    large = 64 * 2.0**24
    assert result.gradient_norm == pytest.approx(0.1 * (large + ones) ** 0.5, rel=2**18 / large)


class KnowsSquares(LocalWorld):
    """A world whose reduction has added up the squares, with a rounding of its own."""

    def reduce(self) -> Gradients:
        gradients = super().reduce()
        squares = sum(float(each.double().square().sum()) for each in gradients.tensors)
        return Gradients(gradients.tensors, squares * (1 + 2**-20))


def test_clipping_rounds_the_same_whether_the_reduction_knows_the_squares() -> None:
    """It does so from the second update of a process on, so a resumed run would differ."""
    weights = []
    for world in (LocalWorld(), KnowsSquares()):
        model = own_generator(runs.convnet(10))
        updater = Updater(Config().replace(clip_norm=0.01), world, model, CPU, {"": runs.TRAINING})
        updater.take(state_of(model, world=world), batch(4))
        weights.append(model.state_dict())
    assert runs.equal(*weights)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_mixed_precision_keeps_weights_in_fp32(precision: str, dtype: torch.dtype) -> None:
    model, exact = (own_generator(runs.batch_norm(10)) for _ in range(2))
    seen = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    state = state_of(model, scale=128.0 if precision == "fp16" else None)
    result = take(Config().replace(precision=precision), state, batch(4))
    assert set(seen) == {dtype}
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
    plain = take(Config(), state_of(exact), batch(4))
    assert result.totals.sums["loss"] == pytest.approx(plain.totals.sums["loss"], rel=0.02)


@pytest.mark.parametrize(
    "vote", [Votes(stop=True), Votes(commit=True), Votes(change=True), Votes(seconds=7.5)]
)
def test_votes_and_samples_of_all_ranks_come_with_the_gradients(vote: Votes) -> None:
    """Also to an idle rank; with the fingerprint of all samples if the run keeps a ledger."""

    def body(world: ThreadWorld, *, ledger: bool) -> tuple[Votes, int | None]:
        model = own_generator(runs.batch_norm(10))
        mine = vote if world.place.rank == 1 else Votes()
        updater = Updater(Config().replace(ledger=ledger), world, model, CPU, {"": runs.TRAINING})
        part = batch(4, world.place.rank, 3)
        attempt = updater.begin(state_of(model, world=world), part, mine)
        for micro in part.micro_batches:
            attempt.start(micro)
            attempt.backward(runs.TRAINING.function(model, micro.batch))
        result, agreed = attempt.finish(lambda: None)
        return agreed, result.fingerprint

    expected = fingerprint(np.array([0, 1, 2, 3] * 2))
    assert run_ranks(3, lambda world: body(world, ledger=True)) == [(vote, expected)] * 3
    assert run_ranks(3, lambda world: body(world, ledger=False)) == [(vote, None)] * 3

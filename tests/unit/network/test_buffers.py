"""The buffers of a model: which rule each follows, and what must not change them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hvd_train.errors import UsageError
from hvd_train.network import buffers
from hvd_train.network.buffers import buffers_of, unchanged
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.runs import small_config, trained
from tests.support.worlds import ThreadWorld, run_ranks


def test_running_statistics_and_named_ones_are_averaged() -> None:
    """A pattern is one as of `--freeze`; all other buffers have the value of slot 0."""
    model = nn.Sequential(nn.BatchNorm1d(3), runs.Remembers(), nn.InstanceNorm1d(3, track_running_stats=True))
    statistics = {f"{n}.{name}" for n in (0, 2) for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert buffers.averaged(model, ()) == statistics
    assert buffers.averaged(model, ("*.mean", "1.pass*")) == statistics | {"1.mean", "1.passes"}


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("means", r"no buffer of the model is called means; besides running statistics, they are called 0\.mean, .*"),
        ("0.numb*", r"--average-buffers 0\.numb\*: 0\.numbers holds uint8, which has no mean"),
        ("0.beg*", r"0\.begun holds bool"),
    ],
)
def test_names_that_cannot_be_are_told_before_anything_is_trained(pattern: str, told: str) -> None:
    """One line that says what the model has."""
    with pytest.raises(UsageError, match=told):
        trained(LocalWorld(), small_config(average_buffers=(pattern,)), runs.remembers)
    assert not Path("run").exists()


def test_a_model_without_further_buffers_says_so() -> None:
    """Nothing can be named there."""
    with pytest.raises(UsageError, match="besides running statistics, it has none"):
        buffers.averaged(runs.batch_norm(10), ("mean",))


def test_a_tensor_in_two_places_is_one_buffer() -> None:
    """As `named_buffers` has it, in its order."""
    first, second = runs.Remembers(), runs.Remembers()
    second.table = first.table
    model = nn.Sequential(nn.BatchNorm1d(3), first, second)
    assert [buffer.name for buffer in buffers_of(model)] == [name for name, _ in model.named_buffers()]


def test_nothing_of_a_block_stays_in_buffers() -> None:
    """Written to, by way of `data` or not, or replaced: the tensors are those of before, and so are their values."""
    model = runs.Remembers()
    before = dict(model.named_buffers())
    values = {name: tensor.clone() for name, tensor in before.items()}
    with unchanged(model):
        for _ in range(2):
            model(torch.ones(4, 1, 8, 8))
        assert not torch.equal(model.mean, values["mean"])
    after = dict(model.named_buffers())
    assert all(after[name] is tensor and torch.equal(tensor, values[name]) for name, tensor in before.items())


class Counts(nn.Module):
    """Counts its passes in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.passes: Tensor

    def forward(self, images: Tensor) -> Tensor:
        """Return the images."""
        self.passes += 1
        return images


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_changes_no_buffer(ranks: int) -> None:
    """What a pass of an evaluation counts, and the one that checks the model, are in no rank's final buffers."""

    def body(world: ThreadWorld) -> int:
        _, weights = trained(world, small_config(epochs=1), lambda n: nn.Sequential(Counts(), runs.convnet(n)))
        return int(weights["0.passes"])

    assert run_ranks(ranks, body) == [10] * ranks


def test_ranks_end_as_one_whatever_writes_into_a_buffer() -> None:
    """Also a pass that begins late, and unseen by torch: what ranks hold is brought together after each epoch."""

    def make(num_classes: int) -> nn.Module:
        model, passes = runs.convnet(num_classes), itertools.count()
        model.register_buffer("seen", torch.zeros(()))

        def write(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            if module.training and next(passes) > 5:
                module.seen.data.add_(inputs[0].mean())

        model.register_forward_hook(write)
        return model

    results = run_ranks(2, lambda world: trained(world, small_config(epochs=2), make))
    assert torch.equal(*(weights["seen"] for _, weights in results))
    assert results[0][1]["seen"] != 0


def test_what_is_in_no_state_dict_is_loaded_by_name() -> None:
    """A value of another shape takes the buffer's place, and an unknown name is passed over."""
    model = nn.Sequential(runs.Remembers())
    found = buffers.not_in_state_dict(model)
    assert list(found) == ["0.unsaved"]
    before = model[0].unsaved
    buffers.load(model, {"0.unsaved": torch.ones(8), "gone": torch.ones(1)})
    assert model[0].unsaved is before
    assert torch.equal(before, torch.ones(8))
    buffers.load(model, {"0.unsaved": torch.ones(3)})
    assert torch.equal(model[0].unsaved, torch.ones(3))


@pytest.mark.parametrize(("size", "is_new"), [(1, False), (2, True), (3, True)])
def test_a_buffer_whose_numbers_share_memory_gets_memory_of_its_own(size: int, is_new: bool) -> None:
    """What was expanded from one number cannot hold several; a length of 1 is as it was."""
    model = nn.Module()
    model.register_buffer("scale", torch.zeros(2, 1).expand(2, size))
    (buffer,) = buffers_of(model)
    before = buffer.tensor.data_ptr()
    value = torch.arange(2.0 * size).view(2, size)
    buffers.copy_into(buffer, value)
    assert torch.equal(buffer.tensor, value)
    assert (buffer.tensor.data_ptr() != before) is is_new
    assert buffer.tensor.data_ptr() != value.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_value_of_another_number_format_keeps_it(dtype: torch.dtype) -> None:
    """A buffer that was turned into float64 on one rank is so on all."""
    model = nn.Module()
    model.register_buffer("seen", torch.zeros(3))
    buffers.copy_into(buffers_of(model)[0], torch.full((3,), 7, dtype=dtype))
    assert model.seen.dtype == dtype
    assert model.seen.tolist() == [7, 7, 7]


def test_what_is_no_dense_tensor_is_no_buffer_here() -> None:
    """A place that is empty, as of batch norm without statistics, and a sparse table are passed over."""
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Module())
    model[1].register_buffer("table", torch.eye(3).to_sparse())
    model[1].register_buffer("seen", torch.zeros(2))
    model.register_buffer("own", torch.zeros(1))
    assert [(buffer.name, buffer.key) for buffer in buffers_of(model)] == [("own", "own"), ("1.seen", "seen")]


def test_only_the_first_four_buffers_are_told_of() -> None:
    """The line that says what a pattern could have matched stays short."""
    model = nn.Module()
    for number in range(4):
        model.register_buffer(f"b{number}", torch.zeros(1))
    with pytest.raises(UsageError, match=r"they are called b0, b1, b2, b3$"):
        buffers.averaged(model, ("none",))
    model.register_buffer("b4", torch.zeros(1))
    with pytest.raises(UsageError, match=r"they are called b0, b1, b2, b3, \.\.\.$"):
        buffers.averaged(model, ("none",))


def test_buffers_but_those_with_a_name_are_copied_to_a_copy() -> None:
    """A moving average takes over tables and counters, and keeps what it averages itself."""
    source, target = runs.Remembers(), runs.Remembers()
    for buffer in buffers_of(source):
        buffer.put(torch.ones_like(buffer.tensor))
    kept = target.mean
    buffers.copy_others(source, target, {"mean"})
    assert target.mean is kept
    assert not kept.any()
    assert all(bool(buffer.tensor.all()) for buffer in buffers_of(target) if buffer.name != "mean")
    buffers_of(source)[-1].tensor.zero_()
    assert buffers_of(target)[-1].tensor.all(), "a copy"


def test_a_value_from_elsewhere_comes_to_where_the_buffer_is() -> None:
    """Ranks tell each other of buffers by way of the CPU."""
    model = nn.Module()
    model.register_buffer("seen", torch.zeros(3, device="meta"))
    buffers.copy_into(buffers_of(model)[0], torch.ones(5))
    assert (model.seen.device.type, model.seen.shape) == ("meta", (5,))

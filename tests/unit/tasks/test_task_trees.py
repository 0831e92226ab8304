"""Inputs and targets that are trees: as such they come to the model and the loss, from memory and from items."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hvd_train import Task, train
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.lent_memory import Task as Reading
from hvd_train.data.loader_process import TaskReader, Unreadable
from hvd_train.data.map_loader import MapLoader
from hvd_train.data.prepare import AsTheyAre
from hvd_train.data.trees import Packed, Tree, leaves, structure, unpacked
from hvd_train.errors import UsageError
from hvd_train.progress.order import Cut, EpochOrder, assignments
from tests.support.batches import CPU
from tests.support.own_tasks import Sequences, padded
from tests.support.runs import Weights, equal, largest_difference, small_config
from tests.support.task_runs import Items, on_ranks
from tests.support.worlds import own_generator

COUNT = 20


class Named(NamedTuple):
    left: Tensor
    right: Any


@dataclass(frozen=True)
class Kept:
    left: Tensor
    right: Tensor


KINDS: dict[str, Any] = {
    "dict": lambda left, right: {"left": left, "right": right},
    "tuple": lambda left, right: (left, right),
    "named tuple": Named,
    "dataclass": Kept,
}


class Sees(nn.Module):
    """Notes how its inputs came, and adds up what it makes of both."""

    def __init__(self, seen: set[object]) -> None:
        super().__init__()
        self.seen, self.left, self.right = seen, nn.Linear(3, 1), nn.Linear(2, 1)

    def forward(self, *inputs: Any, **by_name: Tensor) -> Tensor:
        self.seen.add((*map(type, inputs), *by_name))
        left, right = leaves([*inputs, *by_name.values()])
        outputs: Tensor = (self.left(left) + self.right(right)).squeeze(1)
        return outputs


def trained(kind: str, seen: set[object], *, items: bool) -> Weights:
    """Train two epochs on inputs and targets of a kind, which the loss asserts, and return the weights."""
    make, generator = KINDS[kind], torch.Generator().manual_seed(2)
    inputs = make(torch.randn(COUNT, 3, generator=generator), torch.randn(COUNT, 2, generator=generator))
    targets = make(torch.randn(COUNT, generator=generator), torch.randn(COUNT, generator=generator))

    def loss(outputs: Tensor, targets: Tree) -> Tensor:
        assert type(targets) is type(inputs)
        left, right = leaves(targets)
        return (outputs - left).square() + (outputs + right).square()

    source = Items(inputs, targets, COUNT, ()) if items else Arrays(inputs, targets, COUNT)
    built: list[nn.Module] = []

    def model() -> nn.Module:
        built.append(own_generator(Sees(seen)))
        return built[0]

    config = small_config(epochs=2, global_batch_size=8, output_dir=Path(f"{kind}-{items}"))
    train(config, model=model, data=lambda _: DataSet(source, None), task=Task(loss=loss))
    return dict(built[0].state_dict())


def test_trees_arrive_as_they_are() -> None:
    """A dict is given by name and a tuple as arguments; the others come whole. All train to the same bits."""
    expected = None
    for kind, how in {
        "dict": ("left", "right"),
        "tuple": (Tensor, Tensor),
        "named tuple": (Named,),
        "dataclass": (Kept,),
    }.items():
        for items in (False, True):
            seen = set[object]()
            weights = trained(kind, seen, items=items)
            expected = expected or weights
            assert equal(weights, expected), kind
            assert seen == {how}


def nested(count: int) -> tuple[Tree, Tree]:
    """A tree of all kinds, with leaves of several sizes and number formats, and another one as targets."""
    numbers = torch.arange(count)
    wide = Kept(numbers.double().view(-1, 1).expand(-1, 5).contiguous(), numbers.to(torch.uint8))
    inputs = {"all": Named(numbers.view(-1, 1) * torch.ones(3), (numbers + 100, wide)), "flag": [numbers % 2 == 0]}
    return inputs, (numbers * 2, Named(numbers / 2, numbers.bool()))


@pytest.mark.slow
def test_trees_come_through_loader_processes() -> None:
    """With two processes the batches are those without: in structure, number format and every number."""
    batches = []
    for workers in (0, 2):
        loader = MapLoader(Items(*nested(30), 30, ()), AsTheyAre(), CPU, seed=1, num_workers=workers)
        loader.start()
        try:
            work = [(e, assignments(EpochOrder(1, e, 30), 0, Cut(8, 3), 0, 1)) for e in range(2)]
            loaded = [micro for e, part in work for batch in loader.load(e, part) for micro in batch.micro_batches]
        finally:
            loader.close()
        batches.append(loaded)
    assert len(batches[0]) == len(batches[1])
    for alone, other in zip(*batches, strict=True):
        rows = torch.from_numpy(alone.samples)
        for part, whole in zip(("inputs", "targets"), nested(30), strict=True):
            assert structure(getattr(alone, part)) == structure(getattr(other, part)) == structure(whole)
            trees = (getattr(alone, part), getattr(other, part), whole)
            for a, b, every in zip(*map(leaves, trees), strict=True):
                assert a.dtype == b.dtype == every.dtype
                assert torch.equal(a, b)
                assert torch.equal(a, every[rows])


def test_leaves_lie_side_by_side_in_lent_memory() -> None:
    """Each at a multiple of 64 bytes; what does not fit has memory of its own, and the batch is whole."""
    buffer = torch.zeros(300, dtype=torch.uint8)
    batch = TaskReader(Items(*nested(30), 30, ()), seed=1)[Reading([(0, 3), (0, 4)], 0, {0: buffer})]
    assert not isinstance(batch, Unreadable)
    inputs = batch[0]
    assert isinstance(inputs, Packed)
    begin, end = buffer.data_ptr(), buffer.data_ptr() + len(buffer)
    places = [leaf.data_ptr() - begin for leaf in inputs.leaves if begin <= leaf.data_ptr() < end]
    assert places == [0, 64, 128, 256]  # of 24, 16, 80 and 2 bytes
    for leaf, whole in zip(inputs.leaves, leaves(nested(30)[0]), strict=True):
        assert torch.equal(leaf, whole[3:5])
    assert structure(unpacked(inputs)) == structure(nested(30)[0])


class Pads(nn.Module):
    """A weight for each place of a sequence, for as many as it is long."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(4))

    def forward(self, numbers: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(numbers.shape[1])
        outputs: Tensor = (numbers * self.weights[: numbers.shape[1]] * (places < lengths.unsqueeze(1))).sum(1)
        return outputs


def test_samples_of_different_lengths_need_a_collate_of_ones_own() -> None:
    """With it two ranks train as one does; without, the first batch of two lengths is refused."""

    def run(folder: str, world: Any = None, **own: Any) -> Tensor:
        built: list[Pads] = []

        def model() -> nn.Module:
            built.append(Pads())
            return built[0]

        task = Task(loss=lambda outputs, targets: (outputs - targets).square(), **own)
        config = small_config(epochs=2, global_batch_size=5, batch_size=2, output_dir=Path(folder))
        train(config, model=model, data=lambda _: (Sequences(), Sequences()), task=task, world=world)
        return built[0].weights.detach()

    alone = run("alone", collate=padded)
    assert alone.all()
    for weights in on_ranks(2, lambda world: run("ranks", world, collate=padded)):
        assert largest_difference({"": weights}, {"": alone}) <= 1e-5
    with pytest.raises(UsageError, match="model custom cannot take inputs"):
        run("without")


def test_a_collate_is_called_in_loader_processes() -> None:
    """What it makes of a slot is what it makes of it here."""
    found = []
    for workers in (0, 1):
        loader = MapLoader(Sequences(), AsTheyAre(), CPU, seed=1, num_workers=workers, collate=padded)
        loader.start()
        try:
            work = assignments(EpochOrder(1, 0, 12), 0, Cut(5, 2), 0, 1)
            micros = [micro for batch in loader.load(0, work) for micro in batch.micro_batches]
        finally:
            loader.close()
        found.append([(micro.inputs["numbers"].tolist(), micro.targets.tolist()) for micro in micros])
    assert found[0] == found[1]


@pytest.mark.parametrize("returned", [3, (torch.zeros(2),), (torch.zeros(2), ["a", "b"])], ids=str)
def test_a_collate_that_returns_no_two_trees_is_refused(returned: Any) -> None:
    """As one line, and not as what comes of it later."""
    with pytest.raises(UsageError, match=r"collate must return \(inputs, targets\), tensors or tuples, lists, dicts"):
        train(
            small_config(),
            model=Pads,
            data=lambda _: (Sequences(), None),
            task=Task(loss=lambda outputs, targets: outputs, collate=lambda items: returned),
        )

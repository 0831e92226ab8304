"""Losses over many pixels or tokens, in half precision."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvd_train import Config
from hvd_train.errors import Diverged
from hvd_train.session import Session
from hvd_train.tasks.builtin import open_task
from hvd_train.tasks.task import Mean, SumOfMeans
from hvd_train.world.world import LocalWorld, World
from tests.support.launching import notes, records
from tests.support.runs import equal, small_config, trained
from tests.support.worlds import own_generator, run_ranks


def masks(config: Any = None) -> tuple[TensorDataset, None]:
    """Return 6 pictures of 512 pixels, whose mask is the sign of the first colour."""
    images = torch.cos(torch.arange(6 * 2 * 512.0 * 512)).view(6, 2, 512, 512)
    return _with_classes(TensorDataset(images, (images[:, 0] > 0).long()), 2), None


def texts(config: Any = None) -> tuple[TensorDataset, None]:
    """Return 6 texts of 4,096 tokens."""
    tokens = (torch.arange(6 * 4097) * 7919 % 11).view(6, 4097)
    return _with_classes(TensorDataset(tokens[:, :-1], tokens[:, 1:]), 11), None


def _with_classes(data: TensorDataset, count: int) -> TensorDataset:
    data.classes = tuple(map(str, range(count)))  # type: ignore[attr-defined]
    return data


TASKS: dict[str, tuple[Callable[[int], nn.Module], Callable[[Any], Any]]] = {
    "segmentation": (lambda _: nn.Conv2d(2, 2, 1), masks),
    "language-model": (lambda _: nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11)), texts),
}


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("segmentation", {"compression": "fp16"}),
        ("segmentation", {"compression": "bf16", "precision": "bf16"}),
        ("language-model", {"precision": "fp16"}),
    ],
)
def test_no_step_of_a_loss_over_many_elements_is_skipped(name: str, half: dict[str, str]) -> None:
    """Gradients of pictures of 512 pixels and texts of 4,096 tokens fit into
    fp16 from the first step on.
    """
    make, data = TASKS[name]
    config = small_config(epochs=1, global_batch_size=2, batch_size=1, learning_rate=0.1, **half)
    task = open_task(Config().replace(task=name), ("a", "b"))

    def body(world: World) -> bool:
        return equal(
            trained(world, config, make, data, task)[1], own_generator(make(0)).state_dict()
        )

    assert run_ranks(2, body) == [False, False]
    steps = records("step")
    assert [step["skipped_steps"] for step in steps] == [0, 0, 0]


def played(
    loss_of: Callable[[nn.Module, tuple[Tensor, Tensor]], Mean | SumOfMeans], **settings: Any
) -> list[bool]:
    """Return of each step of a loop whether it was skipped."""
    model = own_generator(nn.Conv2d(2, 2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    config = Config().replace(batch_size=1, device="cpu", workers=0, compression="fp16", **settings)
    skipped = []
    with Session(model, optimizer, masks()[0], config=config, world=LocalWorld()) as session:
        for step in session.steps():
            for micro in step:
                micro.backward(loss_of(model, micro.batch))
            skipped.append(step.skipped)
    return skipped


def test_a_loss_scale_that_is_too_large_ends_no_run() -> None:
    """It halves with each skipped step; these do not count as a divergence
    while the loss is finite.
    """

    def steep(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return Mean(losses * 2.0**30, torch.tensor(2.0**18))

    skipped = played(steep, epochs=6, precision="fp16")
    first = skipped.index(False)
    assert 10 < first < len(skipped)
    assert not any(skipped[first:])


def test_a_loss_of_several_terms_fits_into_half_precision() -> None:
    """Once the counts of the first step are known, also in the
    micro-batches before the last one.
    """

    def terms(model: nn.Module, batch: tuple[Tensor, Tensor]) -> SumOfMeans:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return Mean(losses.sum(), losses.numel()) + Mean(
            losses[batch[1] == 1].sum(), (batch[1] == 1).sum()
        )

    skipped = played(terms, epochs=2, precision="fp16", global_batch_size=2)
    assert not any(skipped[1:])


def test_a_gradient_that_is_never_finite_ends_the_run() -> None:
    def endless(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
        return Mean((model(batch[0]).sum() * 0).sqrt())

    with pytest.raises(Diverged, match="the loss is finite, but not its gradient"):
        played(endless, epochs=10)


def test_automatic_precision_is_fp32_on_cpus() -> None:
    _, expected = trained(LocalWorld(), small_config(epochs=1, output_dir=Path("fp32")))
    _, weights = trained(LocalWorld(), small_config(epochs=1, precision="auto"))
    assert equal(weights, expected)
    assert [note.partition(",")[0] for note in notes()] == ["the arithmetic is fp32 on CPUs"]

"""Losses over many pixels or tokens, in half precision."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from hvd_train import Config
from hvd_train.errors import Diverged
from hvd_train.session import Session
from hvd_train.tasks.builtin import open_task
from hvd_train.tasks.task import Mean, SumOfMeans
from hvd_train.world.world import LocalWorld
from tests.support.launching import notes, records
from tests.support.runs import equal, small_config, trained
from tests.support.worlds import own_generator, run_ranks


class Items(TensorDataset):
    classes = ("0", "1")


def masks(config: Any = None) -> tuple[Items, None]:
    """Return 6 pictures of 512 pixels, whose mask is the sign of the first colour."""
    images = torch.cos(torch.arange(6 * 2 * 512.0 * 512)).view(6, 2, 512, 512)
    return Items(images, (images[:, 0] > 0).long()), None


def texts(config: Any = None) -> tuple[Items, None]:
    """Return 6 texts of 4,096 tokens."""
    tokens = (torch.arange(6 * 4097) * 7919 % 11 % 2).view(6, 4097)
    return Items(tokens[:, :-1], tokens[:, 1:]), None


def pixels(num_classes: int) -> nn.Module:
    return nn.Conv2d(2, num_classes, 1)


def tokens(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(2, 4), nn.Linear(4, num_classes))


@pytest.mark.parametrize(
    ("task", "make", "data", "half"),
    [
        ("segmentation", pixels, masks, {"compression": "fp16"}),
        ("segmentation", pixels, masks, {"compression": "bf16", "precision": "bf16"}),
        ("language-model", tokens, texts, {"precision": "fp16"}),
    ],
)
def test_no_step_of_a_loss_over_many_elements_is_skipped(
    task: str, make: Any, data: Any, half: dict[str, str]
) -> None:
    """Gradients of pictures of 512 pixels and texts of 4,096 tokens fit into
    fp16 from the first step on.
    """
    config = small_config(epochs=1, global_batch_size=2, batch_size=1, learning_rate=0.1, **half)
    opened = open_task(Config().replace(task=task), Items.classes)
    begun = own_generator(make(2)).state_dict()
    for _, weights in run_ranks(2, lambda world: trained(world, config, make, data, opened)):
        assert not equal(weights, begun)
    assert [step["skipped_steps"] for step in records("step")] == [0, 0, 0]


def played(loss_of: Callable[[nn.Module, Any], Mean | SumOfMeans], **settings: Any) -> list[bool]:
    """Return of each step of a loop whether it was skipped."""
    model = own_generator(pixels(2))
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

    def steep(model, batch):
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

    def terms(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return Mean(losses.sum(), losses.numel()) + Mean(
            losses[batch[1] == 1].sum(), (batch[1] == 1).sum()
        )

    skipped = played(terms, epochs=2, precision="fp16", global_batch_size=2)
    assert not any(skipped[1:])


def test_a_gradient_that_is_never_finite_ends_the_run() -> None:
    with pytest.raises(Diverged, match="the loss is finite, but not its gradient"):
        played(lambda model, batch: Mean((model(batch[0]).sum() * 0).sqrt()), epochs=10)


def test_automatic_precision_is_fp32_on_cpus() -> None:
    _, expected = trained(LocalWorld(), small_config(epochs=1, output_dir=Path("fp32")))
    _, weights = trained(LocalWorld(), small_config(epochs=1, precision="auto"))
    assert equal(weights, expected)
    assert [note.partition(",")[0] for note in notes()] == ["the arithmetic is fp32 on CPUs"]

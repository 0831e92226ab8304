"""Random changes of single images beyond the data set's own, and mixes within a micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchvision.transforms import v2

from hvd_train.data import sources
from hvd_train.data.dataset import Arrays
from hvd_train.data.transforms import Items, Mix, training_transform
from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig
from hvd_train.world.world import LocalWorld
from tests.support.runs import equal, small_config, trained


@pytest.mark.parametrize(("augment", "kind"), [("trivial", v2.TrivialAugmentWide), ("rand", v2.RandAugment)])
def test_policies_come_after_the_usual_changes_and_before_erasing(augment: str, kind: type) -> None:
    """The order is that of torchvision's references; erased parts get the mean colour."""
    config = DataConfig(data="cifar10", augment=augment, random_erasing=0.25)  # type: ignore[arg-type]
    steps = training_transform(config, [v2.RandomHorizontalFlip()], (0.5, 0.4, 0.3)).transforms
    assert [type(step) for step in steps] == [v2.RandomHorizontalFlip, kind, v2.RandomErasing]
    assert (steps[2].p, steps[2].value) == (0.25, [128, 102, 76])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_is_changed_the_same_way_in_whatever_process(workers: int) -> None:
    """Weights after an epoch with TrivialAugment and random erasing do not depend on loader processes."""
    config = small_config(augment="trivial", random_erasing=0.5, epochs=1, workers=workers)
    _, weights = trained(LocalWorld(), config)
    _, again = trained(LocalWorld(), config.replace(workers=0, output_dir=Path("again")))
    _, unchanged = trained(LocalWorld(), config.replace(augment="standard", output_dir=Path("unchanged")))
    assert equal(weights, again)
    assert not equal(weights, unchanged)


def test_images_in_memory_are_changed_one_by_one() -> None:
    """The usual changes of the data set are not applied a second time to the batch."""
    plain = sources.open_data(DataConfig(data="digits"), seed=0)
    changed = sources.open_data(DataConfig(data="digits", augment="rand"), seed=0)
    assert isinstance(plain.train, Arrays)
    assert plain.augment is not None
    assert isinstance(changed.train, Items)
    assert changed.augment is None
    assert len(changed.train) == len(plain.train)
    torch.manual_seed(0)
    image, label = changed.train[5]
    assert (image.dtype, image.shape, label) == (torch.uint8, plain.train.inputs[5].shape, int(plain.train.targets[5]))
    assert isinstance(changed.val, Arrays), "evaluation sees them as they are"


def test_a_data_set_of_items_has_its_own_changes() -> None:
    """`--augment trivial` is refused, not ignored, for data whose items are made by the user."""
    with pytest.raises(UsageError, match=r"do not go with --data tests\.support\.runs:mapped_digits"):
        sources.open_data(DataConfig(data="tests.support.runs:mapped_digits", augment="trivial"), seed=0)


def test_mixup_blends_images_and_targets_alike() -> None:
    """An image becomes share * itself + (1 - share) * its neighbour, and so does its target."""
    torch.manual_seed(3)
    images, targets = torch.rand(4, 1, 5, 5), torch.tensor([0, 1, 2, 3])
    mixed, shares = Mix(DataConfig(mixup=1.0), 4)(images, targets)
    own = float(shares[0, 0])
    assert 0 < own < 1
    torch.testing.assert_close(mixed, own * images + (1 - own) * images.roll(1, 0))
    torch.testing.assert_close(shares, own * torch.eye(4) + (1 - own) * torch.eye(4).roll(1, 0))


def test_cutmix_shares_are_those_of_the_area() -> None:
    """The share of a target is that of the pixels that were not taken from the neighbour."""
    torch.manual_seed(4)
    images, targets = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 16, 16), torch.arange(4)
    mixed, shares = Mix(DataConfig(cutmix=1.0), 4)(images, targets)
    kept = float((mixed[2] == 2).float().mean())
    assert 0 < kept < 1
    assert float(shares[2, 2]) == pytest.approx(kept)
    assert float(shares[2, 1]) == pytest.approx(1 - kept)


def test_both_mixes_take_turns() -> None:
    """Where mixup and cutmix are asked for, some micro-batches are blended and others are patched."""
    mix = Mix(DataConfig(mixup=1.0, cutmix=1.0), 2)
    images, targets = torch.stack([torch.zeros(1, 8, 8), torch.ones(1, 8, 8)]), torch.arange(2)
    torch.manual_seed(0)
    patched = {set(mix(images, targets)[0].unique().tolist()) <= {0.0, 1.0} for _ in range(20)}
    assert patched == {True, False}

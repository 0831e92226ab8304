"""Random changes to single images in loader processes, by torchvision: what a config adds to those of the data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchvision.transforms import v2

from hvd_train.config import DataConfig
from hvd_train.data.dataset import Arrays, Mark, unmarked


def training_transform(config: DataConfig, usual: Sequence[Any], mean: tuple[float, ...]) -> v2.Compose:
    """`usual`, then what the config adds, in the order of torchvision's training references, for uint8 images.

    TrivialAugment: Müller and Hutter, arXiv 2103.10158. RandAugment: Cubuk et al., arXiv 1909.13719, with their
    2 operations of magnitude 9. Random erasing: Zhong et al., arXiv 1708.04896, with the mean colour.
    """
    steps = list(usual)
    if config.augment == "trivial":
        steps.append(v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR))
    if config.augment == "rand":
        steps.append(v2.RandAugment(interpolation=v2.InterpolationMode.BILINEAR))
    if config.random_erasing > 0:
        steps.append(v2.RandomErasing(p=config.random_erasing, value=[round(255 * share) for share in mean]))
    return v2.Compose(steps or [v2.Identity()])


class Items:
    """A data set in memory, item by item, with a transform."""

    def __init__(self, arrays: Arrays, transform: Any) -> None:
        self.arrays, self._transform = arrays, transform

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.staged_item(index, unmarked)

    def staged_item(self, index: int, mark: Mark) -> tuple[Tensor, int]:
        """The same, which tells `mark` when it is read and changed."""
        row = index % len(self.arrays.images)
        image, label = self.arrays.images[row], int(self.arrays.labels[row])
        mark("read")
        image = self._transform(image)
        mark("augment")
        return image, label


class Mix:
    """mixup and cutmix of a micro-batch (Zhang et al., arXiv 1710.09412; Yun et al., arXiv 1905.04899).

    At least one of them is asked for. Within a micro-batch, so that it is the same whichever rank takes it; its numbers
    are drawn from torch's default generator.
    """

    def __init__(self, config: DataConfig, num_classes: int) -> None:
        mixers = []
        if config.mixup > 0:
            mixers.append(v2.MixUp(alpha=config.mixup, num_classes=num_classes))
        if config.cutmix > 0:
            mixers.append(v2.CutMix(alpha=config.cutmix, num_classes=num_classes))
        self._mix = mixers[0] if len(mixers) == 1 else v2.RandomChoice(mixers)

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Images [n, c, h, w] float and class numbers [n] to images alike and shares of the classes [n, classes]."""
        mixed: tuple[Tensor, Tensor] = self._mix(images, targets)
        return mixed

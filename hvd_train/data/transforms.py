"""Random changes by torchvision, of single images and of micro-batches."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchvision.transforms import v2
from typing_extensions import override

from hvd_train.data.dataset import Arrays, Mark, Staged
from hvd_train.settings.data import DataConfig


def training_transform(config: DataConfig, usual: Sequence[Any], mean: tuple[float, ...]) -> v2.Compose:
    """Return a transform of uint8 images: the `usual` ones, then the config's.

    The order follows torchvision's training references. TrivialAugment: Müller and Hutter, arXiv 2103.10158.
    RandAugment: Cubuk et al., arXiv 1909.13719, with their 2 operations of magnitude 9. Random erasing: Zhong et al.,
    arXiv 1708.04896, filled with the colour `mean` (values 0..1).
    """
    steps = list(usual)
    if config.augment == "trivial":
        steps.append(v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR))
    if config.augment == "rand":
        steps.append(v2.RandAugment(interpolation=v2.InterpolationMode.BILINEAR))
    if config.random_erasing > 0:
        steps.append(v2.RandomErasing(p=config.random_erasing, value=[round(255 * share) for share in mean]))
    return v2.Compose(steps or [v2.Identity()])


class Items(Staged):
    """A data set in memory whose images are read and transformed one by one."""

    def __init__(self, arrays: Arrays, transform: Any) -> None:
        self.arrays, self._transform = arrays, transform

    @override
    def __len__(self) -> int:
        return len(self.arrays)

    @override
    def staged_item(self, index: int, mark: Mark) -> tuple[Tensor, int]:
        row = self.arrays.rows(index)
        image, label = self.arrays.images[row], int(self.arrays.labels[row])
        mark("read")
        image = self._transform(image)
        mark("augment")
        return image, label


class Mix:
    """Mixup or cutmix of a micro-batch (Zhang et al., arXiv 1710.09412; Yun et al., arXiv 1905.04899)."""

    def __init__(self, config: DataConfig, num_classes: int) -> None:
        mixers = []
        if config.mixup > 0:
            mixers.append(v2.MixUp(alpha=config.mixup, num_classes=num_classes))
        if config.cutmix > 0:
            mixers.append(v2.CutMix(alpha=config.cutmix, num_classes=num_classes))
        self._mix = mixers[0] if len(mixers) == 1 else v2.RandomChoice(mixers)

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return mixed images [n, c, h, w] and targets [n, classes] for images and class numbers [n]."""
        mixed: tuple[Tensor, Tensor] = self._mix(images, targets)
        return mixed

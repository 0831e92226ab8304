"""The images of a run, their source and their transforms."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvd_train.errors import UsageError
from hvd_train.settings.fields import at_least, free, share


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images, their source and their transforms."""

    data: str = "digits"
    """Data set: digits, cifar10, cifar100, folder, synthetic, or your own as package.module:function."""
    data_dir: Path | None = free(None)
    """Folder of the data; for `folder` it holds train/ and val/, with one folder per class."""
    download: bool = free(False)
    """Fetch the data set into the data folder if it is not there (cifar10, cifar100)."""
    image_size: int | None = None
    """Side of the square images the model sees, in pixels; default: the data set's own size."""
    val_crop_size: int | None = None
    """Side of the square crop that evaluation sees, in pixels, for `folder`; default: image-size."""
    val_resize_size: int | None = None
    """Length of an image's shorter side before that crop, in pixels, for `folder`; default: 256/224 of the crop."""
    max_image_pixels: int = free(90_000_000)
    """Pixels (width times height) of the largest image file that is decoded, for `folder`. Decoding takes up to 25
    bytes of memory a pixel, and a file of some hundred bytes can claim billions of pixels."""
    augment: Literal["standard", "trivial", "rand", "none"] = "standard"
    """Random changes to training images: standard is what is usual for the data set; trivial and rand add
    TrivialAugment (wide) or RandAugment to it."""
    random_erasing: float = 0.0
    """Probability that a rectangle of a training image is blanked."""
    mixup: float = 0.0
    """Blend the images of a micro-batch in pairs, with shares drawn from Beta(mixup, mixup); 0 turns it off."""
    cutmix: float = 0.0
    """Paste a rectangle of another image of the micro-batch into each, with an area drawn from Beta(cutmix, cutmix);
    0 turns it off. With --mixup as well, each micro-batch gets one of the two."""
    repeated_augmentation: int = 1
    """Take each sample this many times in a row, each time changed differently; that many epochs use the data once."""
    workers: int | None = free(None)
    """Loader processes per rank, for data read from files (0: load in the training process); default: one for each
    core of the rank, at most 4."""
    workers_per_host: int | None = free(None)
    """Loader processes of all ranks of a host together; given instead of `workers`."""
    synthetic_samples: int = 2048
    """Number of training images of the `synthetic` data set."""

    def __post_init__(self) -> None:
        at_least("image-size", self.image_size, 1)
        at_least("val-crop-size", self.val_crop_size, 1)
        at_least("val-resize-size", self.val_resize_size, self.val_crop_size or 1)
        at_least("max-image-pixels", self.max_image_pixels, 1)
        at_least("repeated-augmentation", self.repeated_augmentation, 1)
        share("random-erasing", self.random_erasing)
        at_least("mixup", self.mixup, 0)
        at_least("cutmix", self.cutmix, 0)
        if self.data != "folder" and (self.val_crop_size or self.val_resize_size):
            raise UsageError(f"--val-crop-size and --val-resize-size go with --data folder, not with {self.data}")
        at_least("workers", self.workers, 0)
        at_least("workers-per-host", self.workers_per_host, 0)
        at_least("synthetic-samples", self.synthetic_samples, 1)
        if self.data == "folder" and self.data_dir is None:
            raise UsageError("--data folder needs --data-dir: the folder that holds train/ and val/")
        if self.download and self.data not in ("cifar10", "cifar100"):
            raise UsageError(f"--download does not go with --data {self.data}: it works for cifar10 and cifar100")

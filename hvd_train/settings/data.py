"""Which data a run trains on, where they come from, and what is done to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvd_train.errors import UsageError
from hvd_train.plugin import HUGGING_FACE
from hvd_train.settings.arguments import arguments_in
from hvd_train.settings.fields import at_least, free, share, to_paths

ENCODED = ("folder", "webdataset", "hf")
"""Data sets that have encoded images, or may have."""
_OF_ENCODED = "--data folder, webdataset or hf"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data, where they come from, and what is done to them."""

    data: str = "digits"
    """Data set: digits, cifar10, cifar100, folder, webdataset, hf:PATH, synthetic; diabetes (a table), digit-shapes
    (pixels with classes), python-docs (a text), tokens (files of them); or your own as package.module:function."""
    data_dir: Path | None = free(None)
    """Folder of the data; for `folder` it holds train/ and val/, with one folder per class; for `webdataset`
    train/*.tar and val/*.tar, or train-*.tar and val-*.tar; for `hf` it is what `save_to_disk` of Hugging Face's
    `datasets` has made (hf:PATH is short for it); for `tokens` train.bin and val.bin (uint16), or train.npy and
    val.npy."""
    data_columns: tuple[str, ...] = ()
    """Columns of `hf` that are not found by their types and names, as in --data-columns image=img label=fine_label;
    for other tasks than classification input=[a,b] target=c."""
    download: bool = free(False)
    """Fetch the data set into the data folder if it is not there (cifar10, cifar100)."""
    image_size: int | None = None
    """Side of the square images the model sees, in pixels; default: the data set's own size."""
    sequence_length: int = 128
    """Tokens of a sample, for `python-docs` and `tokens`."""
    val_crop_size: int | None = None
    """Side of the square crop that evaluation sees of image files, in pixels; default: image-size."""
    val_resize_size: int | None = None
    """Length of an image's shorter side before that crop, in pixels; default: 256/224 of the crop."""
    max_image_pixels: int = free(90_000_000)
    """Pixels (width times height) of the largest image file that is decoded. Decoding takes up to 25 bytes of
    memory a pixel, and a file of some hundred bytes can claim billions of pixels."""
    decode: Literal["cpu", "gpu"] = "cpu"
    """Who decodes JPEG files: the loader processes, or the GPU of the rank (nvJPEG, by torchvision),
    whose pixels differ a little. Other files, and JPEGs of rare kinds, are decoded by the loader processes."""
    cache: Literal["none", "memory", "disk"] = "none"
    """Keep images of `folder`, reduced to what evaluation sees of them (256 pixels on the shorter side for 224), as
    pixels from the first epoch on, for all processes of the host and later jobs: in memory (/dev/shm), or on disk.
    Training crops are then taken from reduced images; evaluation sees the same as without."""
    cache_dir: Path | None = free(None)
    """Folder in which the cache makes its own; default: /dev/shm for memory, ~/.cache for disk."""
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
    """Take each sample this many times in a row, changed differently each time; so many epochs then go through the data
    set once."""
    workers: int | None = free(None)
    """Loader processes per rank, for data read from files (0: load in the training process); default: one for each
    core of the rank, at most 4."""
    workers_per_host: int | None = free(None)
    """Loader processes of all ranks of a host together; given instead of `workers`."""
    synthetic_samples: int = 2048
    """Number of training images of the `synthetic` data set."""

    def __post_init__(self) -> None:
        to_paths(self, "data_dir", "cache_dir")
        if self.data.startswith(HUGGING_FACE):  # the config is frozen, and being made
            object.__setattr__(self, "data_dir", Path(self.data.removeprefix(HUGGING_FACE)) if self.data[3:] else None)
            object.__setattr__(self, "data", "hf")
        at_least("image-size", self.image_size, 1)
        at_least("sequence-length", self.sequence_length, 1)
        at_least("val-crop-size", self.val_crop_size, 1)
        at_least("val-resize-size", self.val_resize_size, self.val_crop_size or 1)
        at_least("max-image-pixels", self.max_image_pixels, 1)
        at_least("repeated-augmentation", self.repeated_augmentation, 1)
        share("random-erasing", self.random_erasing)
        at_least("mixup", self.mixup, 0)
        at_least("cutmix", self.cutmix, 0)
        if self.data not in ENCODED and (self.val_crop_size or self.val_resize_size):
            raise UsageError(f"--val-crop-size and --val-resize-size go with {_OF_ENCODED}, not with {self.data}")
        if self.decode == "gpu" and self.data not in ENCODED:
            raise UsageError(f"--decode gpu goes with {_OF_ENCODED}, not with {self.data}: leave it out")
        if self.decode == "gpu" and (self.augment in ("trivial", "rand") or self.random_erasing):
            raise UsageError(
                "--decode gpu does not go with --augment trivial or rand, nor with --random-erasing, by which loader "
                "processes change single images: type --decode cpu, or --augment standard --random-erasing 0"
            )
        if self.cache != "none" and self.data != "folder":
            raise UsageError(f"--cache {self.cache} goes with --data folder, not with {self.data}: leave it out")
        if self.cache != "none" and self.decode == "gpu":
            raise UsageError("--cache does not go with --decode gpu, which keeps no pixels: leave one of them out")
        if self.cache_dir is not None and self.cache == "none":
            raise UsageError("--cache-dir says where a cache is, and there is none: add --cache disk or --cache memory")
        at_least("workers", self.workers, 0)
        at_least("workers-per-host", self.workers_per_host, 0)
        at_least("synthetic-samples", self.synthetic_samples, 1)
        if self.data == "folder" and self.data_dir is None:
            raise UsageError("--data folder needs --data-dir: the folder that holds train/ and val/")
        if self.data == "webdataset" and self.data_dir is None:
            raise UsageError("--data webdataset needs --data-dir: the folder that holds train/*.tar and val/*.tar")
        if self.data == "hf" and self.data_dir is None:
            raise UsageError("--data hf needs the folder of a data set that `datasets` has saved: type --data hf:PATH")
        if self.data_columns and self.data != "hf":
            raise UsageError(f"--data-columns goes with --data hf:PATH, not with {self.data}: leave it out")
        if unknown := arguments_in("data-columns", self.data_columns).keys() - {"image", "input", "label", "target"}:
            raise UsageError(f"--data-columns {min(unknown)}=...: it takes image, input, label and target")
        if self.data == "tokens" and self.data_dir is None:
            raise UsageError("--data tokens needs --data-dir: the folder that holds train.bin and val.bin")
        if self.download and self.data not in ("cifar10", "cifar100"):
            raise UsageError(f"--download does not go with --data {self.data}: it works for cifar10 and cifar100")

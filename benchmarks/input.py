"""How fast images arrive, over the usual way in torchvision: images per second of one core.

    python -m benchmarks.input               2 minutes on an idle core
    python -m benchmarks.input --quick       a few seconds; no record

Two loaders, each with one process, take turns of a pass over the data set. A pass is measured in
processor time of all processes. JPEG files of 500 x 375 pixels become random resized crops of 224
(training; our device normalises them), or the middle 224 of 256 (evaluation). Theirs is ImageFolder
with the usual transforms of PIL images in a DataLoader. The files are noise whose amplitude falls
with its frequency, as in photographs (Field 1987), and about as large.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks.turns import main, summary, take_turns
from hvd_train.config import DataConfig
from hvd_train.data.dataset import IMAGENET_MEAN, IMAGENET_STD, DataSet, Source
from hvd_train.data.folder import open_folder
from hvd_train.data.loader import Prepare, open_loader
from hvd_train.progress.order import BatchLayout, EpochOrder, assignments

BATCH = 32
CPU = torch.device("cpu")
Pass = Callable[[], int]  # takes every image of a data set once and returns their number


def photograph(generator: np.random.Generator) -> Image.Image:
    """Return an image of 375 x 500 pixels with the statistics of photographs
    that matter to a decoder.
    """
    height = 375
    width = 500
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    # the exponent is -1 to -1.2 in photographs
    amplitude = np.maximum(frequency, 1 / max(height, width)) ** -1.1
    planes = []
    for spread, middle in ((45, np.linspace(150, 100, height)[:, None]), (12, 128), (12, 128)):
        waves = amplitude * (generator.standard_normal((2, *amplitude.shape)).T @ (1, 1j)).T
        plane = np.fft.irfft2(waves, (height, width))
        planes.append(plane / plane.std() * spread + middle)
    return Image.fromarray(np.stack(planes, axis=-1).clip(0, 255).astype(np.uint8), "YCbCr")


def ours(data: DataSet, source: Source) -> Pass:
    """Return a pass through our loader; training leaves the normalisation to the device."""
    prepare = Prepare(data, CPU, image_size=None, augment=data.augment, colour=False)
    if source is data.train:
        prepare = lambda images, *_, **__: images  # noqa: E731
    loader = open_loader(source, prepare, CPU, 0, 1)
    if source is data.train:  # as training does; the loader of an evaluation is not started ahead
        loader.start()
    epochs = count()

    def one() -> int:
        epoch = next(epochs)
        work = assignments(EpochOrder(0, epoch, len(source)), 0, BatchLayout(BATCH, BATCH), 0, 1)
        return sum(
            len(micro.samples)
            for batch in loader.load(epoch, work)
            for micro in batch.micro_batches
        )

    return one


def per_second(images: Pass) -> float:
    """Return the images of a pass per second of the processor time of this process
    and its loader processes.
    """

    def processor_seconds() -> float:
        this = psutil.Process()  # the clocks of clock_getcpuclockid(3), which count nanoseconds
        clocks = [~process.pid << 3 | 2 for process in (this, *this.children(recursive=True))]
        return sum(map(time.clock_gettime, clocks))

    before = processor_seconds()
    return images() / (processor_seconds() - before)


def photographs(root: Path, number: int) -> float:
    """Write JPEG files in 4 classes, which are both training and validation set;
    return their mean size in kB.
    """
    generator = np.random.default_rng(0)
    paths = [root / "train" / f"{i % 4}" / f"{i:04}.jpg" for i in range(number)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(generator).save(path, quality=90)
    (root / "val").symlink_to("train")
    return statistics.mean(path.stat().st_size for path in paths) / 1000


def measure(quick: bool) -> list[dict[str, Any]]:
    """Return the comparisons."""
    images, turns = (30, 2) if quick else (128, 12)
    found = []
    tail = [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    crops = {
        "training": [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()],
        "evaluation": [transforms.Resize(256), transforms.CenterCrop(224)],
    }
    with tempfile.TemporaryDirectory(prefix="input-") as name:
        size = photographs(root := Path(name), images)
        data = open_folder(root, DataConfig(data="folder", data_dir=root))
        for kind, crop in crops.items():
            folder = ImageFolder(root / "train", transforms.Compose([*crop, *tail]))
            loader = DataLoader(folder, BATCH, shuffle=True, num_workers=1, persistent_workers=True)
            sides = {
                "ours": ours(data, data.train if kind == "training" else data.val or data.train),
                "usual": lambda batches=loader: sum(len(one[1]) for one in batches),
            }
            rates = take_turns(
                {side: partial(per_second, one) for side, one in sides.items()}, turns, warm_up=2
            )
            values = np.divide(rates["ours"], rates["usual"]).tolist()
            compared = summary(f"JPEG of {size:.0f} KB, {kind}", values, "at least", 1.8)
            medians = {side: round(statistics.median(rates[side])) for side in rates}
            found.append({**compared, "images_per_second": medians})
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(__doc__, "benchmarks.input", {"input": measure})

"""How fast images arrive, beside the usual way in torchvision: images per second of one core.

    python -m benchmarks.input --json benchmarks/records/input.json      3 minutes on an idle core

Each comparison is of two loaders that take turns, a pass over the data set at a time. It measures the processor time of
all their processes, which is what one core would need, whatever else runs on the machine (other work still costs both
loaders their caches).

- training: JPEG files of 500 x 375 pixels in class folders become random resized crops of 224, mirrored at random, as a
  device takes them from loader processes; also with normalisation on the same core; at two qualities of JPEG
- evaluation: the same files, resized to 256, the middle 224, normalised
- memory: 32 x 32 images, padded by 4, cropped at random, mirrored, normalised

Theirs is ImageFolder, or images item by item, with the usual transforms of PIL images in a DataLoader, always
normalised; ours is what `hvd-train train` takes. For JPEG files both have one loader process, in memory none.
The files are made here: noise whose amplitude falls with its frequency, as in photographs (Field 1987), and light that
fades from top to bottom; at quality 90 they have about as many bytes as photographs have.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import psutil
import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks.record import about, at_least, interval, show
from hvd_train.data import pictures
from hvd_train.data.augment import crop_and_flip
from hvd_train.data.dataset import IMAGENET_MEAN, IMAGENET_STD, Arrays, DataSet, Mark, Source
from hvd_train.data.folder import RandomCrop, open_folder
from hvd_train.data.loader import open_loader
from hvd_train.data.prepare import Prepare
from hvd_train.progress.order import Cut, EpochOrder, assignments
from hvd_train.settings.data import DataConfig

BATCH = 32
CPU = torch.device("cpu")
FALL = 1.1  # exponent by which the amplitude falls with frequency: 1 to 1.2 in photographs
NORMALIZE = transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)
Pass = Callable[[], int]
"""A function that takes every image of a data set once and returns their number."""


def photograph(generator: np.random.Generator, height: int, width: int) -> Image.Image:
    """Return an image with the statistics of photographs that matter to a decoder; height and width in pixels."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    amplitude = np.maximum(frequency, 1 / max(height, width)) ** -FALL
    planes = []
    for spread in (45, 12, 12):
        waves = amplitude * (generator.standard_normal((2, *amplitude.shape)).T @ (1, 1j)).T
        plane = np.fft.irfft2(waves, (height, width))
        planes.append(plane / plane.std() * spread)
    light = np.linspace(150, 100, height)[:, None]
    planes[0] += light
    values = np.stack([planes[0], planes[1] + 128, planes[2] + 128], axis=-1)
    return Image.fromarray(values.clip(0, 255).astype(np.uint8), "YCbCr")


def write_folder(root: Path, images: int, quality: int) -> Path:
    """Write `images` JPEG files in 4 classes as train/, link them as val/, and return the folder."""
    generator = np.random.default_rng(0)
    for number in range(images):
        folder = root / "train" / str(number % 4)
        folder.mkdir(parents=True, exist_ok=True)
        photograph(generator, 375, 500).save(folder / f"{number:04}.jpg", quality=quality)
    (root / "val").symlink_to("train")
    return root


class Items(Dataset[tuple[torch.Tensor, int]]):
    """Images in memory as torchvision's CIFAR10 returns them: one by one, through PIL."""

    def __init__(self, data: Arrays) -> None:
        self.images, self.labels = data.images.permute(0, 2, 3, 1).numpy(), data.labels.tolist()
        self.transform = transforms.Compose(
            [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor(), NORMALIZE]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def theirs(data: Any, workers: int) -> Pass:
    """Return a pass through a DataLoader with the usual settings."""
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    return lambda: sum(len(images) for images, _ in loader)


def as_they_are(images: torch.Tensor, uniforms: torch.Tensor | None, mark: Mark) -> torch.Tensor:
    """Return the images unchanged, in place of what happens on the device."""
    return images


def ours(data: DataSet, source: Source, workers: int, *, device: bool = True) -> Pass:
    """Return a pass through our loader, with what happens on the device or without it."""
    prepare = Prepare(data, CPU, image_size=None, augment=data.augment, colour=False) if device else as_they_are
    loader = open_loader(source, prepare, CPU, 0, workers)  # type: ignore[arg-type]
    if source is data.train:  # as training does; the loader of an evaluation is not started ahead
        loader.start()
    epochs = count()

    def one() -> int:
        epoch = next(epochs)
        work = assignments(EpochOrder(0, epoch, len(source)), 0, Cut(BATCH, BATCH), 0, 1)
        return sum(len(micro.inputs) for batch in loader.load(epoch, work) for micro in batch.micro_batches)

    return one


def processor_seconds() -> float:
    """Return the processor time of this process and its loader processes so far; its resolution is nanoseconds."""
    this = psutil.Process()
    clocks = [~process.pid << 3 | 2 for process in (this, *this.children(recursive=True))]  # as clock_getcpuclockid(3)
    return sum(map(time.clock_gettime, clocks))


def compare(name: str, aim: float | None, usual: Pass, our: Pass, turns: int) -> dict[str, Any]:
    """Return images per second of processor time of both, and the ratio of ours to theirs with its 95% interval."""
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 + turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            start = processor_seconds()
            images = (usual, our)[which]()
            if turn >= 2:
                rates[which].append(images / (processor_seconds() - start))
    ratios = [ours_rate / usual_rate for usual_rate, ours_rate in zip(*rates, strict=True)]
    low, high = interval(ratios)
    verdict = {}
    if aim is not None:
        verdict = {"aim": aim, "verdict": at_least(aim, (low, high))}
    comparison: dict[str, Any] = {
        "images_per_second": {
            "usual": round(statistics.median(rates[0]), 1),
            "ours": round(statistics.median(rates[1]), 1),
        },
        "ratio": round(statistics.median(ratios), 3),
        "interval": [round(low, 3), round(high, 3)],
        **verdict,
        "turns": turns,
    }
    print(
        f"{name}: {comparison['ratio']:.2f} ({low:.2f} to {high:.2f})",
        verdict,
        comparison["images_per_second"],
        flush=True,
    )
    return comparison


def stages(paths: Iterable[Path]) -> dict[str, float]:
    """Return the microseconds of processor time that an image takes at each stage of training, in this process."""
    data = [path.read_bytes() for path in paths]
    files, crop = [pictures.Picture(content) for content in data], RandomCrop(224)
    decoded = [Image.open(path).convert("RGB") for path in paths]
    usual = transforms.RandomResizedCrop(224)
    cropped = [usual(image) for image in decoded]
    tensors = [transforms.ToTensor()(image) for image in cropped]
    steps: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "usual: open and decode": (lambda path: Image.open(path).convert("RGB"), list(paths)),
        "usual: crop and resize": (usual, decoded),
        "usual: to a tensor": (transforms.ToTensor(), cropped),
        "usual: normalise": (NORMALIZE, tensors),
        "ours: read and look at the header": (lambda path: pictures.Picture(path.read_bytes()), list(paths)),
        "ours: decode the part and resize": (crop, files),
        "decode all with the same library": (lambda file: file.part(0, 0, file.width, file.height), files),
        "of that, read the entropy code (decoded at 1/8)": (eighth, list(paths)),
    }
    microseconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(5):
        for name, (step, values) in steps.items():
            start = time.process_time()
            for value in values:
                step(value)
            microseconds[name].append((time.process_time() - start) / len(values) * 1e6)
    return {name: round(statistics.median(times)) for name, times in microseconds.items()}


def eighth(path: Path) -> None:
    """Decode a file to one value for each block of 8 x 8 pixels."""
    with Image.open(path) as image:
        image.draft("RGB", (image.width // 8, image.height // 8))
        image.load()


def of_files(folder: Path, images: int, turns: int, quality: int) -> dict[str, Any]:
    """Return the comparisons that read JPEG files, and where the time of an image goes."""
    root = write_folder(folder, images, quality)
    files = sorted(root.glob("train/*/*.jpg"))
    change = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    middle = [transforms.Resize(256), transforms.CenterCrop(224)]
    train, val = (
        theirs(ImageFolder(root / "train", transforms.Compose([*steps, transforms.ToTensor(), NORMALIZE])), 1)
        for steps in (change, middle)
    )
    data = open_folder(root, DataConfig(data="folder", data_dir=root))
    assert data.val is not None
    to_device, normalised = (ours(data, data.train, 1, device=device) for device in (False, True))
    record: dict[str, Any] = {"bytes_per_file": round(statistics.mean(file.stat().st_size for file in files))}
    print(f"JPEG files of quality {quality}, {record['bytes_per_file']:,} bytes", flush=True)
    record["training"] = compare("training", 2.0, train, to_device, turns)
    record["training, normalised here"] = compare("training, normalised here", None, train, normalised, turns)
    record["evaluation"] = compare("evaluation", None, val, ours(data, data.val, 1), turns)
    record["microseconds_per_image"] = stages(files[:64])
    return record


def in_memory(images: int, turns: int) -> dict[str, Any]:
    """Return the comparison of small images in memory."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, 32, 32), dtype=torch.uint8, generator=generator)
    small = Arrays(pixels, torch.zeros(images, dtype=torch.int64), images)
    data = DataSet(small, None, ("a",), 3, 32, IMAGENET_MEAN, IMAGENET_STD, crop_and_flip(padding=4))
    return compare("memory", 10.0, theirs(Items(small), 0), ours(data, small, 0), turns)


def main() -> None:
    """Measure, print and, if asked to, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--images", type=int, default=128, help="number of JPEG files; in memory there are 40 times as many"
    )
    parser.add_argument("--turns", type=int, default=12, help="turns of each loader (default: 12)")
    parser.add_argument("--json", type=Path, help="the file that takes the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        **about("benchmarks.input", sys.argv[1:]),
        "versions": {"torchvision": torchvision.__version__, "pillow": PIL.__version__},
        "decodes_parts": pictures.region_library() is not None,
    }
    for quality in (90, 75):
        with tempfile.TemporaryDirectory(prefix="input-") as folder:
            record[f"quality {quality}"] = of_files(Path(folder), options.images, options.turns, quality)
    record["memory"] = in_memory(40 * options.images, options.turns)
    show(record, options.json)


if __name__ == "__main__":
    main()

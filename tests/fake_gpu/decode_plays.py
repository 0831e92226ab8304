"""What tests of `--decode gpu` play on the stand-in: python -m tests.fake_gpu.decode_plays NAME.

Each play reads the class folders in `data` and prints what it has seen as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hvd_train.data import gpu_decoder
from hvd_train.data.dataset import DataSet
from hvd_train.data.folder import open_folder
from hvd_train.data.map_loader import MapLoader
from hvd_train.data.prepare import Prepare
from hvd_train.errors import UsageError
from hvd_train.progress.order import Cut, EpochOrder, assignments
from hvd_train.settings.data import DataConfig

EPOCHS, SIDE = 3, 32


def batches(decode: str, split: str, workers: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the images [n, 3, SIDE, SIDE] of some epochs, from 0 to 255, each batch after work that may be late."""
    folder = Path("data")
    data = open_folder(folder, DataConfig(data="folder", data_dir=folder, decode=decode, image_size=SIDE))  # type: ignore[arg-type]
    plain = Prepare(DataSet((), None, ("a",)), device, image_size=None, augment=None, colour=False)  # type: ignore[arg-type]
    source = getattr(data, split)
    loader = MapLoader(source, plain, device, seed=3, num_workers=workers)
    loader.start()
    for epoch in range(EPOCHS):
        work = assignments(EpochOrder(0, epoch, len(source)), 0, Cut(5, 5), 0, 1)
        for batch in loader.load(epoch, work):
            yield from (micro.inputs * 255 for micro in batch.micro_batches)
    loader.close()


def pixels() -> object:
    """The largest differences to the CPU's images, in training and evaluation; files decoded at once, and in all."""
    decoded = []
    decode = gpu_decoder.decode

    def counted(files: list[Tensor], device: torch.device) -> list[Tensor]:
        decoded.append(len(files))
        return decode(files, device)

    gpu_decoder.decode = counted  # type: ignore[assignment]
    torch.use_deterministic_algorithms(True)  # torch then writes into new memory, too
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    gpu_decoder.check(device)
    differences = []
    for split in ("train", "val"):
        expected = torch.cat([*batches("cpu", split, 0, torch.device("cpu"))])
        found = torch.cat([*batches("gpu", split, 2 if split == "val" else 0, device)]).cpu()
        differences.append((found - expected).abs().max().item())
    return differences, max(decoded), sum(decoded)


def damaged() -> object:
    """The error for a file that the GPU does not decode."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    try:
        for _ in batches("gpu", "train", 0, device):
            pass
    except UsageError as error:
        return str(error)
    return "no error"


def memory() -> object:
    """The largest number of bytes that decoding has held on the device at a time, and those of all images."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    held = [0]
    seen = gpu_decoder.seen

    def watched(*arguments: object) -> Tensor:
        held.append(torch.cuda.memory_allocated(device))
        return seen(*arguments)  # type: ignore[arg-type]

    gpu_decoder.seen = watched  # type: ignore[assignment]
    for _ in batches("gpu", "train", 0, device):
        pass
    return max(held)


if __name__ == "__main__":
    print(json.dumps({"pixels": pixels, "damaged": damaged, "memory": memory}[sys.argv[1]]()))

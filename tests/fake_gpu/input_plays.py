"""What tests play on the stand-in with inputs: python -m tests.fake_gpu.input_plays NAME ARGUMENTS.

Each play prints what it has seen as one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hvd_train import Config
from hvd_train.data.batches import Ahead, Loader
from hvd_train.data.copies import Copies
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.loader import open_loader
from hvd_train.data.prepare import Prepare
from hvd_train.progress.order import Cut, EpochOrder, assignments
from hvd_train.state import TrainState
from hvd_train.step import Votes
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.steps import TaskSteps
from tests.support.tasks import meter_of_classes
from tests.support.worlds import own_generator

SAMPLES, SIDE, STEPS = 32, 64, 2
CPU = torch.device("cpu")


class Images:
    """A map-style data set of made-up images, in bytes or as they come from transforms."""

    def __init__(self, kind: torch.dtype) -> None:
        pixels = torch.arange(SAMPLES * SIDE * SIDE).remainder_(251)
        self.images = pixels.view(SAMPLES, 1, SIDE, SIDE).to(kind)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % 10


def network() -> nn.Module:
    """A small network for these images."""
    pool = nn.AdaptiveAvgPool2d(8)
    return own_generator(nn.Sequential(pool, runs.convnet(10)))


def loader_of(source: str, kind: torch.dtype, device: torch.device) -> Loader:
    """A loader of the images, which are in memory or read item by item."""
    items = Images(kind)
    data = items if source == "items" else Arrays(items.images, torch.arange(SAMPLES) % 10, SAMPLES)
    known = DataSet(data, None, tuple("0123456789"), channels=1, mean=(0.3,), std=(0.7,))
    prepare = Prepare(known, device, image_size=None, augment=None, colour=False)
    return open_loader(data, prepare, device, 0, num_workers=1)


def trained(source: str, kind: torch.dtype, device: torch.device, slots: int) -> tuple[list[Tensor], list[int]]:
    """The weights after steps of so many slots of 2 samples, and the device's bytes at each forward pass."""
    torch.set_num_threads(1)  # as operators.py has it: another number gives other sums
    world, held = LocalWorld(), list[int]()
    model = network().to(device)
    if device.type == "cuda":
        stand_in = ctypes.CDLL(None)
        stand_in.fake_gpu_bytes.restype = ctypes.c_size_t
        model.register_forward_pre_hook(lambda *_: held.append(stand_in.fake_gpu_bytes(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    state = TrainState(model, optimizer, torch.amp.GradScaler(device.type, enabled=False), Cut(2 * slots, 2))
    step = TaskSteps(Config().replace(ledger=True), world, model, device, meter_of_classes())
    loader = loader_of(source, kind, device)
    loader.start()
    for epoch in range(2):
        work = list(assignments(EpochOrder(0, epoch, SAMPLES), 0, state.cut, 0, 1))[:STEPS]
        batches = Ahead(loader.load(epoch, work), lambda _: None)
        for batch in batches:
            result = step.take(state, batch, Votes(), want_norm=False, meanwhile=batches.prepare)
            state.count_step(result.totals, skipped=result.skipped)
    loader.close()
    return [parameter.detach().cpu() for parameter in model.parameters()], held


def accumulation(source: str, kind: str, *numbers_of_slots: str) -> Any:
    """Whether the weights are those of a CPU, and the device's bytes at its fullest forward pass, in micro-batches."""
    seen = []
    for slots in map(int, numbers_of_slots):
        on_cpu, _ = trained(source, getattr(torch, kind), CPU, slots)
        on_gpu, held = trained(source, getattr(torch, kind), torch.device("cuda", 0), slots)
        seen.append((all(map(torch.equal, on_cpu, on_gpu)), max(held) / (2 * SIDE * SIDE * 4)))
    return seen


def copies() -> Any:
    """Whether a copy arrives while kernels keep the default stream busy, and what a kernel reads of it."""
    there = Copies(torch.device("cuda", 0))
    values = torch.arange(1000.0).pin_memory()
    ctypes.CDLL(None).fake_gpu_busy(None, 2000)
    copied, _ = there.begin(values, torch.zeros(1).pin_memory())
    seen = (ctypes.c_float * 1000).from_address(copied.data_ptr())  # the stand-in's memory is the host's
    kernels, expected, arrived = torch.cuda.default_stream(), values.tolist(), False
    while not (arrived or kernels.query()):
        arrived = list(seen) == expected
    with there.use():
        twice = copied * 2
    return arrived, twice.cpu().tolist() == [2 * value for value in expected]


def plays() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The plays of this module by name."""
    for play in (accumulation, copies):
        yield play.__name__, play


if __name__ == "__main__":
    print(json.dumps(dict(plays())[sys.argv[1]](*sys.argv[2:])))

"""The bare programs on GPUs, as `benchmarks.bare --device cuda` starts them: a loop alone, with DDP, or with Horovod.

Each has the settings that an expert chooses. Images are random bytes that live on the device, as those of `hvd-train
train --data synthetic` do; each batch is normalised there. Nothing is read, logged, evaluated or saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.bare import batches, fused_sgd

CLASSES = 1000
SAMPLES, IMAGES = 2**20, 256  # of an epoch, and how many different ones they are
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@runtime_checkable
class SynchronizedOptimizer(Protocol):
    """What Horovod's DistributedOptimizer has beyond torch's optimizers."""

    def synchronize(self) -> None:
        """Wait for the gradients of all ranks."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Let the next step begin without waiting for them."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and how; `precision` other than fp32 is mixed, with the channels innermost in memory."""

    image_size: int
    batch: int
    """Images on each rank."""
    precision: str
    compiled: bool

    @property
    def layout(self) -> torch.memory_format:
        """How images, and weights where that is possible, lie in memory."""
        return torch.contiguous_format if self.precision == "fp32" else torch.channels_last


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, rank: int = 0, ranks: int = 1
) -> Iterator[None]:
    """Train without an end, on the current device; yield when a step is queued, which is before it is done."""
    images = torch.randint(0, 256, (IMAGES, 3, setting.image_size, setting.image_size), dtype=torch.uint8).cuda()
    labels = torch.randint(0, CLASSES, (IMAGES,)).cuda()
    mean, std = (torch.tensor(values, device="cuda").view(3, 1, 1) * 255 for values in (MEAN, STD))
    scaler = torch.amp.GradScaler("cuda", enabled=setting.precision == "fp16")
    for samples in batches(SAMPLES, setting.batch, rank, ranks):
        rows = (samples % IMAGES).cuda(non_blocking=True)
        inputs = ((images[rows] - mean) / std).contiguous(memory_format=setting.layout)
        optimizer.zero_grad()
        with torch.autocast("cuda", DTYPES[setting.precision], enabled=setting.precision != "fp32"):
            loss = cross_entropy(model(inputs), labels[rows])
        scaler.scale(loss).backward()
        if isinstance(optimizer, SynchronizedOptimizer):
            optimizer.synchronize()  # before the scaler looks for overflows, or ranks would disagree about the step
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        yield


def placed(
    network: nn.Module, local_rank: int, setting: Setting, layout: torch.memory_format = torch.contiguous_format
) -> nn.Module:
    """Return the network on this rank's GPU, which becomes the current one, compiled where that is asked for."""
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    torch.backends.cudnn.benchmark = True
    model = network.cuda().to(memory_format=layout)
    if setting.compiled:
        model.compile()
    return model


def alone(network: nn.Module, setting: Setting) -> Iterator[None]:
    """Train on one GPU with torch and nothing else."""
    model = placed(network, 0, setting, setting.layout)
    return loop(model, fused_sgd(model), setting)


def ddp(network: nn.Module, setting: Setting) -> Iterator[None]:
    """Train with DistributedDataParallel over NCCL; with mixed precision gradients travel as fp16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = placed(network, int(os.environ["LOCAL_RANK"]), setting, setting.layout)
    torch.distributed.init_process_group("nccl")
    parallel = nn.parallel.DistributedDataParallel(
        model,
        device_ids=[torch.cuda.current_device()],
        gradient_as_bucket_view=True,
        static_graph=True,
        broadcast_buffers=False,
    )
    if setting.precision != "fp32":
        parallel.register_comm_hook(None, fp16_compress_hook)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return loop(parallel, fused_sgd(model), setting, rank, ranks)


def horovod(network: nn.Module, setting: Setting) -> Iterator[None]:
    """Train with Horovod's DistributedOptimizer; with mixed precision gradients travel as fp16.

    Only images have their channels innermost: Horovod takes no gradients of weights that lie so.
    """
    import horovod.torch as hvd

    hvd.init()
    model = placed(network, hvd.local_rank(), setting)
    optimizer = hvd.DistributedOptimizer(
        fused_sgd(model),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none if setting.precision == "fp32" else hvd.Compression.fp16,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return loop(model, optimizer, setting, hvd.rank(), hvd.size())


PROGRAMS: dict[str, Callable[[nn.Module, Setting], Iterator[None]]] = {
    "alone": alone,
    "ddp-expert": ddp,
    "horovod-expert": horovod,
}

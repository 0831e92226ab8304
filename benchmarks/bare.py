"""The programs that users would write without us: `benchmarks.speed` compares with them.

    horovodrun -np 2 python -m benchmarks.bare horovod NETWORK BATCH --image-size 32
    horovodrun -np 2 python -m benchmarks.bare horovod-expert NETWORK BATCH --image-size 32 --bucket-mb 25
    torchrun --nproc-per-node 2 -m benchmarks.bare ddp NETWORK BATCH --image-size 32
    torchrun --nproc-per-node 2 -m benchmarks.bare ddp-expert NETWORK BATCH --image-size 32 --bucket-mb 25
    torchrun --nproc-per-node 2 -m benchmarks.bare none NETWORK BATCH --image-size 32
    horovodrun -np 2 python -m benchmarks.bare example NETWORK BATCH --image-size 32
    python -m benchmarks.bare alone NETWORK BATCH --device cuda --image-size 224 --precision fp16 --compile

`horovod` and `ddp` are loops over a data set in memory as most write them, `horovod-expert` and `ddp-expert` the same
with the settings that an expert chooses. `none` has these settings too, but its ranks exchange nothing: no program that
exchanges gradients can be faster. `example` follows Horovod's published examples: a DataLoader with transforms of each
sample, and the average over all ranks of each batch's loss and accuracy. On GPUs (`benchmarks.bare_gpu`) there are
`alone`, `ddp-expert` and `horovod-expert`, with random images.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks import networks

LEARNING_RATE = 0.02
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from malloc.h


def images_and_labels(size: int) -> tuple[Tensor, Tensor]:
    """Return the digits that hvd_train trains on, [1437, 1, size, size] from 0 to 1, and their classes, [1437]."""
    digits = load_digits()
    images = torch.from_numpy(digits.images[:1437]).float()[:, None] / 16
    return nn.functional.interpolate(images, size=size), torch.from_numpy(digits.target[:1437])


def batches(count: int, batch: int, rank: int, size: int) -> Iterator[Tensor]:
    """Yield the indices of this rank's part of each global batch, epoch after epoch without an end."""
    epoch = 0
    while True:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        for step in order.split(batch * size):
            yield step.tensor_split(size)[rank]
        epoch += 1


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, size: int, batch: int, rank: int, ranks: int
) -> Iterator[None]:
    """Train without an end; yield after each step. `batch` is the number of images on each rank."""
    images, labels = images_and_labels(size)
    for samples in batches(len(images), batch, rank, ranks):
        optimizer.zero_grad()
        loss = cross_entropy(model(images[samples]), labels[samples])
        loss.backward()
        optimizer.step()
        yield


def share_cores(ranks: int) -> None:
    """Have torch compute with this rank's share of the cores."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def horovod(network: nn.Module, size: int, batch: int) -> Iterator[None]:
    """Train with Horovod's DistributedOptimizer and the broadcast at the start, and nothing else of Horovod."""
    import horovod.torch as hvd

    hvd.init()
    share_cores(hvd.local_size())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=0.9),
        named_parameters=network.named_parameters(),
    )
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    return loop(network, optimizer, size, batch, hvd.rank(), hvd.size())


def ddp(network: nn.Module, size: int, batch: int) -> Iterator[None]:
    """Train with DistributedDataParallel over Gloo."""
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    share_cores(ranks)
    model = nn.parallel.DistributedDataParallel(network)
    return loop(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9), size, batch, rank, ranks)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step: the kernel clears each page again that was given back to it."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def fused_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of an expert: the same arithmetic in one pass over memory."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, fused=True)


def num_groups(network: nn.Module, bucket_mb: int) -> int | None:
    """Return in how many groups Horovod is to send the gradients, of about `bucket_mb` MB each; with 0 in none."""
    tensors = list(network.parameters())
    size_mb = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20
    return min(len(tensors), math.ceil(size_mb / bucket_mb)) if bucket_mb else None


def horovod_expert(network: nn.Module, size: int, batch: int, bucket_mb: int) -> Iterator[None]:
    """Train as `horovod` does, with kept memory, a fused update, and gradients in groups where these are faster."""
    import horovod.torch as hvd

    keep_freed_memory()
    hvd.init()
    share_cores(hvd.local_size())
    optimizer = hvd.DistributedOptimizer(
        fused_sgd(network), named_parameters=network.named_parameters(), groups=num_groups(network, bucket_mb)
    )
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    return loop(network, optimizer, size, batch, hvd.rank(), hvd.size())


def ddp_expert(network: nn.Module, size: int, batch: int, bucket_mb: int) -> Iterator[None]:
    """Train as `ddp` does, with kept memory, a fused update, and DistributedDataParallel told all that it can use."""
    keep_freed_memory()
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    share_cores(ranks)
    model = nn.parallel.DistributedDataParallel(
        network, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    return loop(model, fused_sgd(model), size, batch, rank, ranks)


def none(network: nn.Module, size: int, batch: int) -> Iterator[None]:
    """Train on this rank's part of the batches, and exchange nothing: the ranks' weights come apart."""
    keep_freed_memory()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share_cores(ranks)
    return loop(network, fused_sgd(network), size, batch, rank, ranks)


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """The digits one image at a time, through transforms."""

    def __init__(self, size: int) -> None:
        from torchvision.transforms import v2

        self.images, self.labels = images_and_labels(size)
        self.transform = v2.Compose([v2.ToPILImage(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.labels[index]


def example(network: nn.Module, size: int, batch: int) -> Iterator[None]:
    """Train as Horovod's pytorch_mnist.py and pytorch_imagenet_resnet50.py do."""
    import horovod.torch as hvd

    hvd.init()
    share_cores(hvd.local_size())
    data = Digits(size)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(data, hvd.size(), hvd.rank())
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=0.9),
        named_parameters=network.named_parameters(),
    )
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    for epoch in range(10**9):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            outputs = network(images)
            loss = cross_entropy(outputs, labels)
            accuracy = (outputs.argmax(1) == labels).float().mean()
            hvd.allreduce(loss.detach(), name="loss")
            hvd.allreduce(accuracy, name="accuracy")
            loss.backward()
            optimizer.step()
            yield


OTHERS = {"horovod": horovod, "ddp": ddp, "example": example, "none": none}
WITH_BUCKETS = {"horovod-expert": horovod_expert, "ddp-expert": ddp_expert}


def main() -> None:
    """Train without an end, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=["alone", *OTHERS, *WITH_BUCKETS], help="alone: with cuda")
    parser.add_argument("network", help="a function of benchmarks/networks.py")
    parser.add_argument("batch", type=int, help="images on each rank")
    parser.add_argument("--image-size", type=int, required=True, help="the side of the images")
    parser.add_argument(
        "--bucket-mb", type=int, default=25, help="gradients travel together in so many MB; 0: alone (horovod-expert)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp32", help="with cuda")
    parser.add_argument("--compile", action="store_true", help="with cuda: compile the network")
    options = parser.parse_args()
    torch.manual_seed(0)
    network = getattr(networks, options.network)
    size, batch = options.image_size, options.batch
    if options.device == "cuda":
        from benchmarks import bare_gpu

        setting = bare_gpu.Setting(size, batch, options.precision, options.compile)
        steps = bare_gpu.PROGRAMS[options.program](network(bare_gpu.CLASSES), setting)
    elif options.program in WITH_BUCKETS:
        steps = WITH_BUCKETS[options.program](network(10), size, batch, options.bucket_mb)
    else:
        steps = OTHERS[options.program](network(10), size, batch)
    for _ in steps:
        pass


if __name__ == "__main__":
    main()

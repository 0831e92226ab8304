"""The programs that users would write without us, as simply as they would: `benchmarks.speed` compares with them.

    horovodrun -np 2 python -m benchmarks.bare horovod NETWORK BATCH
    torchrun --nproc-per-node 2 -m benchmarks.bare ddp NETWORK BATCH
    horovodrun -np 2 python -m benchmarks.bare example NETWORK BATCH

`horovod` and `ddp` are loops over a data set in memory. `example` follows Horovod's published examples: a DataLoader
with transforms of each sample, and the average over all ranks of each batch's loss and accuracy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks import networks

LEARNING_RATE = 0.02


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


def horovod(network: nn.Module, size: int, batch: int) -> Iterator[None]:
    """Train with Horovod's DistributedOptimizer and the broadcast at the start, and nothing else of Horovod."""
    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
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
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    model = nn.parallel.DistributedDataParallel(network)
    return loop(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9), size, batch, rank, ranks)


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
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
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


if __name__ == "__main__":
    program, name, batch_size = sys.argv[1:]
    torch.manual_seed(0)
    programs = {"horovod": horovod, "ddp": ddp, "example": example}
    for _ in programs[program](getattr(networks, name)(10), networks.IMAGE_SIZES[name], int(batch_size)):
        pass

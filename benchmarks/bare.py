"""The programs that users would write without us, and the networks that `benchmarks.speed` compares them with.

    horovodrun -np 2 python -m benchmarks.bare horovod NETWORK BATCH
    torchrun --nproc-per-node 2 -m benchmarks.bare ddp NETWORK BATCH
    horovodrun -np 2 python -m benchmarks.bare example NETWORK BATCH

`horovod` and `ddp` are loops over a data set in memory. `example` follows Horovod's published examples: a DataLoader
with transforms of each sample, and the average over all ranks of each batch's loss and accuracy.
"""

import os
import sys
from collections.abc import Callable, Iterator
from itertools import count

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks import plain_elastic
from benchmarks.turns import gated
from hvd_train.network.models import digits_convnet

Batches = Iterator[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]
IMAGE_SIZES = {"convnet": 8, "resnet18": 32, "resnet50": 32}


def waiting(num_classes: int) -> nn.Module:
    """Return a small network whose forward pass takes 50 ms and leaves the cores free, as one on a GPU might."""
    return gated(plain_elastic.network(num_classes))


def convnet(num_classes: int) -> nn.Module:
    """Return the digits recipe's own network, with 0.09 million parameters."""
    return gated(digits_convnet(num_classes))


def resnet18(num_classes: int, name: str = "resnet18") -> nn.Module:
    """Return torchvision's ResNet-18: 11.2 million parameters with 10 classes."""
    from torchvision import models  # here, since it imports torch's compiler, which takes seconds

    network = models.get_model(name, num_classes=num_classes)
    network.register_forward_pre_hook(lambda _, inputs: inputs[0].expand(-1, 3, -1, -1))  # the images are grey
    return gated(network)


def resnet50(num_classes: int) -> nn.Module:
    """Return torchvision's ResNet-50: 23.5 million parameters with 10 classes."""
    return resnet18(num_classes, "resnet50")


def images_and_labels(size: int) -> tuple[Tensor, Tensor]:
    """Return the digits that hvd_train trains on, [1437, 1, size, size] from 0 to 1, and their classes, [1437]."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images[:1437]).float()[:, None] / 16
    return nn.functional.interpolate(images, size=size), torch.from_numpy(digits.target[:1437])


def in_memory(size: int, batch: int, rank: int, ranks: int) -> Batches:
    """Yield batches without an end; `batch` is the number of images on each rank."""
    images, labels = images_and_labels(size)
    for epoch in count():
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for step in order.split(batch * ranks):
            samples = step.tensor_split(ranks)[rank]
            yield images[samples], labels[samples]


def train(model: nn.Module, optimizer: Optimizer, batches: Batches, loss_of: Loss = cross_entropy) -> None:
    """Train until the process is killed."""
    for images, labels in batches:
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        optimizer.step()


def sgd(model: nn.Module, ranks: int) -> torch.optim.SGD:
    """Return the optimizer of all programs, which share the cores."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def start_horovod(network: nn.Module) -> Optimizer:
    """Start Horovod and return its optimizer, with equal weights on all ranks."""
    hvd.init()
    named = network.named_parameters()
    optimizer: Optimizer = hvd.DistributedOptimizer(sgd(network, hvd.size()), named_parameters=named)
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    return optimizer


def horovod(network: nn.Module, size: int, batch: int) -> None:
    """Train with Horovod's DistributedOptimizer and the broadcast at the start, and nothing else of Horovod."""
    optimizer = start_horovod(network)
    train(network, optimizer, in_memory(size, batch, hvd.rank(), hvd.size()))


def ddp(network: nn.Module, size: int, batch: int) -> None:
    """Train with DistributedDataParallel over Gloo."""
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    optimizer = sgd(network, ranks)
    train(nn.parallel.DistributedDataParallel(network), optimizer, in_memory(size, batch, rank, ranks))


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


def example(network: nn.Module, size: int, batch: int) -> None:
    """Train as Horovod's pytorch_mnist.py and pytorch_imagenet_resnet50.py do."""
    optimizer, data = start_horovod(network), Digits(size)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(data, hvd.size(), hvd.rank())
    loader = DataLoader(data, batch_size=batch, sampler=sampler)

    def batches() -> Batches:
        for epoch in count():
            sampler.set_epoch(epoch)
            yield from loader

    def averaged(outputs: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(outputs, labels)
        hvd.allreduce(loss.detach(), name="loss")
        hvd.allreduce((outputs.argmax(1) == labels).float().mean(), name="accuracy")
        return loss

    train(network, optimizer, batches(), averaged)


if __name__ == "__main__":
    program, name, batch_size = sys.argv[1:]
    torch.manual_seed(0)
    globals()[program](globals()[name](10), IMAGE_SIZES[name], int(batch_size))

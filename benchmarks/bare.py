"""The programs that experts would write without us, and the networks that
`benchmarks.speed` compares them with.

    horovodrun -np 2 python -m benchmarks.bare horovod NETWORK BATCH
    torchrun --nproc-per-node 2 -m benchmarks.bare ddp NETWORK BATCH

Both are loops over a data set in memory. They have a fused optimizer, keep freed memory, and send
gradients in the fastest way: Horovod in 4 groups; DDP in buckets of 25 MB, which hold the
gradients, for a static graph and without a broadcast of buffers. DDP has our memory format.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import horovod.torch as hvd
import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from benchmarks import plain_elastic
from benchmarks.turns import gated
from hvd_train.network.models import digits_convnet

IMAGE_SIZES = {
    "waiting": 8,
    "linear": 8,
    "convnet": 8,
    "resnet18": 32,
    "resnet50": 64,
    "mobilenet_v3_large": 64,
    "vgg11": 32,
}
# whose channels we keep innermost in memory, as `auto` does for these models by name
CHANNELS_LAST = {"convnet", "resnet50", "mobilenet_v3_large"}


def waiting(num_classes: int) -> nn.Module:
    """Return a small network whose forward pass takes 50 ms and leaves the cores
    free, as one on a GPU might.
    """
    return gated(plain_elastic.network(num_classes))


def linear(num_classes: int) -> nn.Module:
    """Return a network of one small layer, whose step is almost only the loop around it."""
    return gated(nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes)))


def convnet(num_classes: int) -> nn.Module:
    """Return the digits recipe's own network, with 0.09 million parameters."""
    return gated(digits_convnet(num_classes))


def of_torchvision(name: str, num_classes: int) -> nn.Module:
    """Return one of torchvision's networks; it takes grey images."""
    from torchvision import models  # here, since it imports torch's compiler, which takes seconds

    network = models.get_model(name, num_classes=num_classes)
    network.register_forward_pre_hook(lambda _, inputs: inputs[0].expand(-1, 3, -1, -1))
    return gated(network)


resnet18 = partial(of_torchvision, "resnet18")  # 11.2 million parameters with 10 classes
resnet50 = partial(of_torchvision, "resnet50")  # 23.5 million
mobilenet_v3_large = partial(of_torchvision, "mobilenet_v3_large")  # 4.2 million
vgg11 = partial(of_torchvision, "vgg11")  # 128.8 million


def batches(size: int, batch: int, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of the digits that hvd_train trains on, without an end; `batch` is
    the number of images a rank.

    Images are [batch, 1, size, size] from 0 to 1.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = nn.functional.interpolate(
        torch.from_numpy(digits.images[:1437]).float()[:, None] / 16, size=size
    )
    labels = torch.from_numpy(digits.target[:1437])
    for epoch in count():
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for step in order.split(batch * ranks):
            samples = step.tensor_split(ranks)[rank]
            yield images[samples], labels[samples]


def train(
    model: nn.Module, wrap: Callable[[torch.optim.SGD], Optimizer], batch: int, *world: int
) -> None:
    """Train until the process is killed. The ranks share the cores."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world[1]))
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True))
    for images, labels in batches(IMAGE_SIZES[NETWORK], batch, *world):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()


def horovod(network: nn.Module, batch: int) -> None:
    """Train with Horovod's DistributedOptimizer and the broadcast at the start,
    and nothing else of Horovod.
    """
    hvd.init()
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    wrap = partial(hvd.DistributedOptimizer, named_parameters=network.named_parameters(), groups=4)
    train(network, wrap, batch, hvd.rank(), hvd.size())


def ddp(network: nn.Module, batch: int) -> None:
    """Train with DistributedDataParallel over Gloo."""
    distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(
        network, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    train(model, lambda sgd: sgd, batch, distributed.get_rank(), distributed.get_world_size())


def alone(network: nn.Module, batch: int) -> None:
    """Train each rank by itself: two ranks without an exchange, which no program can outrun."""
    train(
        network,
        lambda sgd: sgd,
        batch,
        int(os.environ.get("RANK", "0")),
        int(os.environ.get("WORLD_SIZE", "1")),
    )


if __name__ == "__main__":
    program, NETWORK, batch_size = sys.argv[1:]
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    torch.manual_seed(0)
    network = globals()[NETWORK](10)
    if NETWORK in CHANNELS_LAST and program != "horovod":  # which sends contiguous tensors only
        network.to(memory_format=torch.channels_last)
    globals()[program](network, int(batch_size))

"""Small complete trainings of a second or two: data, loaders, models and configs."""

import functools
import math
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hvd_train import Config, checkpoint
from hvd_train.config import DataConfig
from hvd_train.data import sources
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.loader import Prepare
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import Batch
from hvd_train.result import Result
from hvd_train.run import train
from hvd_train.state import to_host
from hvd_train.tasks.builtin import classification
from hvd_train.tasks.task import Mean, Measure, Measuring, Scores, Task, Total
from hvd_train.world.world import World
from tests.support.worlds import StoppingRank, StoppingWorld, own_generator, run_ranks

Weights = dict[str, Tensor]
RUN = Path("run")  # of `small_config`
NUM_SAMPLES = 190
NUM_VAL = 60
CPU = torch.device("cpu")
CLASSIFY = classification(Config(), tuple("0123456789"))
TRAINING = Measuring(CLASSIFY.measure)
TRAINING(lambda images: torch.zeros(2, 10), (torch.zeros(2, 1, 8, 8), torch.arange(2)), 2)  # type: ignore[arg-type]
PLAIN_DATA = DataSet((), None, ("a",), channels=1)  # type: ignore[arg-type]
PLAIN = Prepare(PLAIN_DATA, CPU, image_size=None, augment=None, colour=False)


DONE = Result(
    run_dir=Path("runs/my run"),
    finished=True,
    saved=True,
    stopped_by=None,
    epochs=20,
    steps=460,
    scores={"loss": 0.03, "top1": 0.991},
    best={"loss": math.nan, "top1": 0.997},
    best_epoch=11,
    test={},
    why="done",
    samples_per_second=2306.4,
    world_size=2,
    seconds=18.2,
)


def totals(loss: float = 1.0, top1: float = 2.0, count: int = 20) -> Totals:
    """Return the sums of a step."""
    return Totals(
        count, {"loss": loss, "top1": top1}, dict.fromkeys(("loss", "top1"), float(count))
    )


def odd_digits() -> Task:
    """Return a task whose loss is the mean over odd digits, as over tokens without padding.

    Some batches have none.
    """

    def measure(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Measure]:
        images, labels = batch
        logits = model(images)
        odd = labels % 2 == 1
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        pairs = torch.bincount(10 * labels + logits.argmax(1), minlength=100)
        loss = Mean(losses[odd].sum(), odd.sum())
        return {
            "loss": loss,
            "right": logits.argmax(1) == labels,
            "pairs": Total(pairs.view(10, 10)),
        }

    def summary(scores: Scores) -> dict[str, float]:
        table = scores.total("pairs")
        return {"wrong": float(table.sum() - table.trace())}

    return Task(measure, summary=summary, best="wrong", sample="digit")


def few_digits(config: DataConfig) -> DataSet:
    """Return the digits as usual, but only `NUM_SAMPLES` of them to train on."""
    return _few()


@functools.cache
def _few() -> DataSet:
    digits = sources.open_data(DataConfig(data="digits"), seed=0)
    train, val = (
        Arrays(part.images[:count], part.labels[:count], count)
        for part, count in ((digits.train, NUM_SAMPLES), (digits.val, NUM_VAL))
    )
    return replace(digits, train=train, val=val)


class Jittered:
    """A map-style data set whose items draw from torch's generator, as
    torchvision's transforms do.
    """

    classes = tuple("0123456789")

    def __init__(self, count: int, *, jitter: bool) -> None:
        data = _few().train
        self.images = data.images[:count].float() / 255
        self.labels = data.labels[:count]
        self.jitter = jitter

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.jitter:
            image = image.roll(int(torch.randint(3, ())), dims=-1) + 0.1 * torch.randn(image.shape)
        return image, int(self.labels[index])


def mapped_digits(config: DataConfig) -> tuple[Jittered, Jittered]:
    return Jittered(NUM_SAMPLES, jitter=True), Jittered(NUM_VAL, jitter=False)


class Killed(Jittered):
    """A data set whose loader process is killed at its 50th item, as if memory ran out."""

    reads = 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        if self.reads == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def killed_digits(config: DataConfig) -> tuple[Killed, None]:
    return Killed(NUM_SAMPLES, jitter=False), None


class RandomItems:
    """A map-style data set of 30 items, which draw from all three
    generators that transforms use.
    """

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return torch.tensor([index, *drawn]).view(1, 2, 2), index % 3


def flat(batches: list[Batch]) -> Tensor:
    return torch.cat(
        [micro.batch[0].flatten(1) for batch in batches for micro in batch.micro_batches]
    )


def convnet(num_classes: int) -> nn.Module:
    features = nn.Conv2d(1, 8, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*features, nn.Linear(128, num_classes))


def batch_norm(num_classes: int) -> nn.Module:
    features = nn.Conv2d(1, 8, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(
        *features, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, num_classes)
    )


def dropout(num_classes: int) -> nn.Module:
    """Return a network with dropout, not for thread ranks, which share
    torch's default generator.
    """
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, num_classes)
    )


class Remembers(nn.Module):
    """Images [n, 1, 8, 8] less a running mean; forward passes change buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, 8, 8))
        self.register_buffer("spread", torch.ones((), dtype=torch.float64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))
        self.register_buffer("numbers", torch.Generator().manual_seed(5).get_state())
        self.register_buffer("behind", torch.zeros(3))
        self.register_buffer("unsaved", torch.zeros(8), persistent=False)
        self.register_buffer("table", torch.arange(8.0))  # stays as it is

    def forward(self, images: Tensor) -> Tensor:
        """Return images of the same shape; in training each buffer but one
        changes, each in another way.
        """
        if self.training:
            generator = torch.Generator()
            generator.set_state(self.numbers)
            noise = torch.randn(8, generator=generator)
            self.numbers = generator.get_state()  # a new tensor
            self.mean = 0.9 * self.mean + 0.1 * images.mean(0)
            self.spread.lerp_(images.double().var(), 0.1)  # in place
            self.unsaved.mul_(0.9).add_(images.mean((0, 1, 2)))
            self.behind.data.add_(images.sum().detach())  # unseen by torch's counter of versions
            self.passes += 1
            self.begun.fill_(True)
            images = images + 0.01 * noise
        scale = (
            1 + self.spread.float() + 0.001 * (self.passes + self.begun) + 0.0001 * self.behind[0]
        )
        return (images - self.mean + 0.1 * self.unsaved + 0.01 * self.table) / scale


def remembers(num_classes: int) -> nn.Module:
    """Return a smooth network with spectral norm whose output depends on many buffers."""
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 32))
    # drawn from torch's default generator, which ranks that are threads share
    for vector in linear.buffers():
        vector.copy_(torch.cos(torch.arange(float(len(vector)))))
    return nn.Sequential(Remembers(), nn.Flatten(), linear, nn.Tanh(), nn.Linear(32, num_classes))


def deep(num_classes: int) -> nn.Module:
    """Return a network of many small parameters, which three ranks cannot divide evenly."""
    hidden = [
        layer for width in (65, 66, 67, 68) for layer in (nn.Linear(width, width + 1), nn.Tanh())
    ]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 65), *hidden, nn.Linear(69, num_classes))


def smooth(num_classes: int) -> nn.Module:
    """Return a network without kinks, so that runs agree to 1e-5; spectral norm
    changes buffers in each pass.
    """
    hidden = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
    layers = nn.Linear(64, 64), nn.Tanh(), hidden, nn.Tanh(), nn.Linear(64, num_classes)
    return own_generator(nn.Sequential(nn.Flatten(), *layers))


def late(make: Callable[[int], nn.Module], num_classes: int, *, seed: int) -> nn.Module:
    """Return a model whose gradients are delayed by random times."""
    model = make(num_classes)
    delays = random.Random(seed)
    for parameter in model.parameters():
        parameter.register_hook(lambda _: time.sleep(delays.uniform(0, 0.004)))
    return model


def small_config(**changes: object) -> Config:
    """Return a config of five epochs of ten steps; the last batch is smaller, and
    slots do not divide evenly.
    """
    settings = {
        "epochs": 5,
        "global_batch_size": 20,
        "batch_size": 4,
        "learning_rate": 0.05,
        "warmup_epochs": 1.0,
        "data": "digits",
        "output_dir": RUN,
        "commit_seconds": None,
        "log_steps": 1,
        "device": "cpu",
        "workers": 0,
    }
    return Config().replace(**settings | changes)


def trained(
    world: World,
    config: Config,
    make: Callable[[int], nn.Module] = convnet,
    data: Callable[[DataConfig], object] = few_digits,
    task: Task | None = None,
) -> tuple[Result, Weights]:
    """Train in `world`, and return the result and the final weights on this rank."""
    built = []

    def model(num_classes: int) -> nn.Module:
        built.append(own_generator(make(num_classes)))
        return built[-1]

    result = train(config, model=model, data=data, task=task, world=world)
    return result, to_host(built[-1].state_dict())


def trained_on_changing_ranks(
    config: Config, data: Callable[[DataConfig], object] = few_digits
) -> list[tuple[Result, Weights]]:
    """Train 14 steps on one rank, five on three and the rest on two, which give the results."""
    trained(StoppingWorld(14), config, data=data)
    body = lambda world: trained(world, config, data=data)  # noqa: E731
    run_ranks(3, body, kind=StoppingRank)
    return run_ranks(2, body)


def steps_on_disk() -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in checkpoint.committed(RUN)]


def largest_difference(first: Weights, second: Weights) -> float:
    """Return the largest absolute difference of two state dicts with the same names."""
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def equal(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )

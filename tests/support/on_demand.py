"""Models for trainings under launchers: workers that follow orders, record their memory or have a large state.

Orders: the file `PLACE-HOST` in the job's folder says how the worker of a host fails.
"""

import itertools
import math
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_train.errors import RankLost
from tests.support.runs import convnet, smooth
from tests.support.worlds import own_generator

EVERY = 10  # steps between two records of a worker's memory
TO_TRAIN = "--momentum 0.9 --ema-decay 0.9"  # the state has each weight three times
UNITS = 640_000  # of the first layer: 65 numbers each, of 4 bytes, three times, are 499 MB


def obedient(num_classes: int) -> nn.Module:
    """Return `smooth`, which obeys orders in forward passes, before updates and when its state is read.

    "update" is between a step's last message from other ranks and its first change of a weight.
    """
    model = smooth(num_classes)
    model.register_forward_pre_hook(lambda *_: _obey("forward"))
    model.register_forward_hook(_take_time)
    model.register_state_dict_pre_hook(lambda *_: _obey("state"))
    register_optimizer_step_pre_hook(lambda *_: _obey("update"))
    return model


def heavy(num_classes: int) -> nn.Module:
    """Return `smooth` with a ballast of 100 MB, so that writing a checkpoint takes a while."""
    model = smooth(num_classes)
    model.register_buffer("ballast", torch.zeros(25, 2**20))
    return model


def weighty(num_classes: int) -> nn.Module:
    """Return `obedient` with 25 MB of distinct numbers, which take a while on a slow link."""
    model = obedient(num_classes)
    model.register_buffer("ballast", torch.arange(25 * 2**18, dtype=torch.int32))
    return model


def order(folder: Path, place: str, host: str, what: str) -> None:
    """Order the next worker of `host` at `place` to "die", lose a rank ("lost") or raise an error."""
    _put(folder / f"{place}-{host}", what)


def pace(folder: Path, seconds: float) -> None:
    """Make every slot sleep this many seconds."""
    _put(folder / "pace", str(seconds))


def _put(path: Path, text: str) -> None:
    """Write a file atomically."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def _take_time(model: nn.Module, *_: object) -> None:
    with suppress(FileNotFoundError):
        if model.training:
            time.sleep(float(Path("pace").read_text()))


def _obey(place: str) -> None:
    path = Path(f"{place}-{socket.gethostname()}")
    try:
        what = path.read_text()
        path.unlink()
    except FileNotFoundError:
        return
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "lost":
        raise RankLost("an operation that is done on all other ranks")
    raise RuntimeError(what)


def flat(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))


def watched(num_classes: int) -> nn.Module:
    """Return a small convnet that writes its process's memory in bytes to rss-PID every `EVERY` steps."""
    model = convnet(num_classes)
    process, passes = psutil.Process(), itertools.count()

    def look(model: nn.Module, *_: object) -> None:
        if model.training and next(passes) % EVERY == 0:
            with Path(f"rss-{process.pid}").open("a") as file:
                file.write(f"{process.memory_info().rss}\n")

    model.register_forward_pre_hook(look)
    return model


class Pooled(nn.Module):
    """Add groups of k units and divide by sqrt(k): [n, 64 k] becomes [n, 64]."""

    def forward(self, units: Tensor) -> Tensor:
        parts = units.unflatten(1, (64, -1))
        return parts.sum(2) / math.sqrt(parts.shape[2])


def wide(num_classes: int) -> nn.Module:
    """Return a network with 500 MB of trained state, smooth as `runs.smooth`; a step takes half a second."""
    hidden = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
    layers = nn.Linear(64, UNITS), nn.Tanh(), Pooled(), hidden, nn.Tanh(), nn.Linear(64, num_classes)
    return own_generator(nn.Sequential(nn.Flatten(), *layers))


def tolerance(weights: dict[str, Tensor], steps: int) -> float:
    """Return how far two trainings may differ if only the order of additions differs.

    Each step rounds each weight and its average once, by at most half a unit in the last place of the largest. Other
    errors are multiplied by the learning rate, and none grows, since the network has no kinks.
    """
    largest = max(float(tensor.abs().max()) for tensor in weights.values() if tensor.is_floating_point())
    return 2 * steps * largest * torch.finfo(torch.float32).eps / 2

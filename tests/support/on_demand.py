"""Models for trainings under launchers, which are slow, fail or have a large state."""

import atexit
import ctypes
import math
import socket
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.support.runs import smooth
from tests.support.worlds import own_generator

TO_TRAIN = "--momentum 0.9 --ema-decay 0.9"  # the state has each weight three times
UNITS = 640_000  # of the first layer: 65 numbers each, of 4 bytes, three times, are 499 MB


def obedient(num_classes: int) -> nn.Module:
    """Return `smooth`, whose slots last as long as `pace` says and which
    raises the errors of `fail`.
    """
    model = smooth(num_classes)
    model.register_forward_pre_hook(_raise_error)
    model.register_forward_hook(_take_time)
    return model


def fail(folder: Path, host: str, what: str) -> None:
    """Let the next worker of `host` raise an error with this text in a forward pass."""
    _put(folder / f"error-{host}", what)


def hold_lock(folder: Path, host: str, seconds: int) -> None:
    """Let C code hold Python's lock for this long in the next forward
    pass of a worker of `host`.
    """
    _put(folder / f"lock-{host}", str(seconds))


def end_slowly(folder: Path, host: str, seconds: int) -> None:
    """Let the process of each worker of `host` take this long to end, in C code
    that holds Python's lock.
    """
    _put(folder / f"end-{host}", str(seconds))


def pace(folder: Path, seconds: float) -> None:
    """Make every slot sleep this many seconds."""
    _put(folder / "pace", str(seconds))


def _put(path: Path, text: str) -> None:
    """Write a file atomically."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def _raise_error(*_: object) -> None:
    path = Path(f"error-{socket.gethostname()}")
    with suppress(FileNotFoundError):
        what = path.read_text()
        path.unlink()
        raise RuntimeError(what)


def _hold_lock(*_: object) -> None:
    path = Path(f"lock-{socket.gethostname()}")
    with suppress(FileNotFoundError):
        seconds = int(path.read_text())
        path.unlink()
        ctypes.PyDLL(None).sleep(seconds)


def _end_slowly(path: Path) -> None:
    with suppress(FileNotFoundError):
        ctypes.PyDLL(None).sleep(int(path.read_text()))


def _take_time(model: nn.Module, *_: object) -> None:
    with suppress(FileNotFoundError):
        if model.training:
            time.sleep(float(Path("pace").read_text()))


def weighty(num_classes: int) -> nn.Module:
    """Return `obedient` with 25 MB of distinct numbers, which take a while on a slow link."""
    model = obedient(num_classes)
    model.register_buffer("ballast", torch.arange(25 * 2**18, dtype=torch.int32))
    return model


def flat(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))


class Pooled(nn.Module):
    """Add groups of k units and divide by sqrt(k): [n, 64 k] becomes [n, 64]."""

    def forward(self, units: Tensor) -> Tensor:
        parts = units.unflatten(1, (64, -1))
        return parts.sum(2) / math.sqrt(parts.shape[2])


def wide(num_classes: int) -> nn.Module:
    """Return a network with 500 MB of trained state, smooth as `runs.smooth`; a
    step takes half a second.

    `hold_lock` and `end_slowly` act on its workers.
    """
    atexit.register(_end_slowly, Path(f"end-{socket.gethostname()}").absolute())
    hidden = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
    layers = (
        nn.Linear(64, UNITS),
        nn.Tanh(),
        Pooled(),
        hidden,
        nn.Tanh(),
        nn.Linear(64, num_classes),
    )
    model = own_generator(nn.Sequential(nn.Flatten(), *layers))
    model.register_forward_pre_hook(_hold_lock)
    return model


def tolerance(weights: dict[str, Tensor], steps: int) -> float:
    """Return how far two trainings may differ if only the order of additions differs.

    Each step rounds each weight and its average once, by at most half a unit in the last place of
    the largest. Other errors are multiplied by the learning rate, and none grows, since the network
    has no kinks.
    """
    largest = max(
        float(tensor.abs().max()) for tensor in weights.values() if tensor.is_floating_point()
    )
    return 2 * steps * largest * torch.finfo(torch.float32).eps / 2

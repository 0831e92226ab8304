"""A model whose workers follow orders: the file `PLACE-HOST` in the job's folder says how a host's worker fails."""

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_train.errors import RankLost
from tests.support.runs import smooth


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


def misspelt(num_classes: int) -> nn.Module:
    raise NameError(f"a typo in the model of {num_classes} classes")


def flat(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

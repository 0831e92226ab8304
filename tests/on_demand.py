"""A model whose worker fails where a test wants it to: a file in the job's folder, `PLACE-HOST`, says how."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import torch
from torch import nn

from tests.runs import smooth


def obedient(num_classes: int) -> nn.Module:
    """`smooth`, which looks for orders when it is built, in each forward pass, and when it is given a state."""
    _obey("build")
    model = smooth(num_classes)
    model.register_forward_pre_hook(lambda *_: _obey("forward"))
    model.register_load_state_dict_pre_hook(lambda *_: _obey("load"))
    model.register_state_dict_pre_hook(lambda *_: _obey("state"))
    return model


def slow(num_classes: int) -> nn.Module:
    """`obedient`, which takes 0.2 s for each slot without being busy, so that there is time for things to happen."""
    model = obedient(num_classes)
    model.register_forward_hook(lambda module, *_: time.sleep(0.2) if module.training else None)
    return model


def heavy(num_classes: int) -> nn.Module:
    """`smooth` with a ballast of 100 MB, so that a checkpoint takes a while to write."""
    model = smooth(num_classes)
    model.register_buffer("ballast", torch.zeros(25, 2**20))
    return model


def order(folder: Path, place: str, host: str, what: str) -> None:
    """Have the next worker of `host` that comes to `place` obey: "die", "wait SECONDS", or raise with these words."""
    (folder / "order").write_text(what)
    (folder / "order").rename(folder / f"{place}-{host}")


def obeyed(folder: Path, place: str, host: str) -> bool:
    """Whether a worker has come to it."""
    return not (folder / f"{place}-{host}").exists()


def _obey(place: str) -> None:
    path = Path(f"{place}-{socket.gethostname()}")
    try:
        what = path.read_text()
        path.unlink()
    except FileNotFoundError:
        return
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what.startswith("wait "):
        time.sleep(float(what.removeprefix("wait ")))
    else:
        raise RuntimeError(what)

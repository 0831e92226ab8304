"""A model whose ranks record how much memory they hold."""

import os
from pathlib import Path

from torch import nn

from tests.support.runs import convnet

EVERY = 10
_PAGE = os.sysconf("SC_PAGE_SIZE")


def watched(num_classes: int) -> nn.Module:
    """Return a small convnet that writes its process's memory in bytes to rss-PID every `EVERY` steps."""
    model = convnet(num_classes)
    file = (Path.cwd() / f"rss-{os.getpid()}").open("w", buffering=1)
    passes = 0

    def look(model: nn.Module, *_: object) -> None:
        nonlocal passes
        if model.training:
            if passes % EVERY == 0:
                file.write(f"{int(Path('/proc/self/statm').read_text().split()[1]) * _PAGE}\n")
            passes += 1

    model.register_forward_pre_hook(look)
    return model

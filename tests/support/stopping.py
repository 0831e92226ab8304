"""Models that ask for a stop in the middle of an epoch, once, where a file says so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from torch import nn

from tests.support import small_text
from tests.support.on_demand import flat

STOP = Path("stop")
"""The file, with the number of the pass in training before which the process stops itself as by a batch system."""


def of_images(num_classes: int) -> nn.Module:
    """Return a small model for images of any size."""
    return _stopping(flat(num_classes))


def of_tokens(vocabulary: int) -> nn.Module:
    """Return a small language model."""
    return _stopping(small_text.model(vocabulary))


def _stopping(model: nn.Module) -> nn.Module:
    passes = 0

    def count(module: nn.Module, inputs: object) -> None:
        nonlocal passes
        passes += module.training
        if STOP.exists() and passes == int(STOP.read_text()):
            STOP.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGTERM)

    model.register_forward_pre_hook(count)
    return model

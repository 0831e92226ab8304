"""The device of the tests that run on any: the CPU, unless whoever starts them names another."""

from __future__ import annotations

import ctypes
import os

import torch

VARIABLE = "HVD_TRAIN_TEST_DEVICE"
DEVICE = torch.device(os.environ.get(VARIABLE, "cpu"))
# The stand-in for a GPU takes ten times as long as a CPU for a step, and what goes wrong there does so at once.
EPOCHS = 5 if DEVICE.type == "cpu" else 1


def keep_busy(milliseconds: int) -> None:
    """Give a GPU something else to do first, so that what is queued from here on is late; a CPU does all at once."""
    if DEVICE.type == "cpu":
        return
    if hasattr(ctypes.CDLL(None), "fake_gpu_busy"):
        ctypes.CDLL(None).fake_gpu_busy(None, milliseconds)
    else:
        torch.cuda._sleep(milliseconds * 1_000_000)  # cycles

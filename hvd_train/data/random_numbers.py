"""Seed the random numbers of torch, numpy and `random`, and put them back."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(number: int) -> None:
    """Seed all three on all devices, before code of the user runs: ranks
    then draw the same numbers.
    """
    torch.manual_seed(number)
    _seed_others(number)


def seed_on_cpu(number: int) -> None:
    """Seed all three, torch on the CPU alone, which takes a hundredth of the time."""
    torch.default_generator.manual_seed(number)
    _seed_others(number)


def _seed_others(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)


@contextmanager
def unchanged_numbers(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Put the random numbers of the CPU and of these GPUs back after the block."""
    of_random = random.getstate()
    of_numpy = np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(of_random)
            np.random.set_state(of_numpy)

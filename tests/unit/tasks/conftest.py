"""What tests of several tasks begin with."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def draw() -> torch.Generator:
    """A generator of random numbers that are the same in each test."""
    return torch.Generator().manual_seed(11)

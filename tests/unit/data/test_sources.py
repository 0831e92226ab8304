"""Data sets by name."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from hvd_train.config import DataConfig
from hvd_train.data import sources
from hvd_train.data.dataset import Arrays


@pytest.mark.parametrize("where", ["in its file", "elsewhere"])
def test_the_digits_are_scikit_learns(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image with its label, whether scikit-learn's file is read or, where there is none, its function called."""
    if where == "elsewhere":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    data = sources.open_data(DataConfig(data="digits"), seed=0)
    raw: Any = load_digits()
    shuffled = np.random.default_rng(1998).permutation(len(raw.target))
    for part, rows in ((data.val, shuffled[:360]), (data.train, shuffled[360:])):
        assert isinstance(part, Arrays)
        expected = (raw.images[rows] * (255 / 16)).round().astype(np.uint8)
        assert torch.equal(part.images, torch.from_numpy(expected).unsqueeze(1))
        assert torch.equal(part.labels, torch.from_numpy(raw.target[rows]))

"""One rank computes a wrong gradient under a real launcher: it is named, and the result is that of a run without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.launching import HVD_TRAIN, finished, launch_line

pytestmark = [pytest.mark.integration, pytest.mark.slow]

MODEL = """
import os
from torch import nn
from hvd_train.network.small import digits_convnet

def model(num_classes):
    net, passes = nn.Sequential(digits_convnet(num_classes), nn.Dropout(0.1)), 0

    def flip(gradient):
        nonlocal passes
        passes += 1
        if os.environ.get("FLIPS") and os.environ.get("HOROVOD_RANK") == "1" and 40 < passes <= 52:
            gradient = gradient.clone()
            gradient.view(-1)[0] *= -2
        return gradient

    next(net.parameters()).register_hook(flip)
    return net
"""


def test_a_wrong_gradient_is_found_and_undone(tmp_path: Path) -> None:
    """Of three ranks the wrong one is named with its host; with dropout and mixup the rechecks change no bit."""
    (tmp_path / "mine.py").write_text(MODEL)
    words = "digits --model mine:model --epochs 1 --mixup 0.2 --batch-size 8 --global-batch-size 48 --commit-steps 8"
    line = launch_line("gloo", 3, HVD_TRAIN, "train", *words.split(), "--recheck-steps")
    code, output = finished([*line, "none", "--output-dir", "undisturbed"], tmp_path)
    assert code == 0, output
    code, output = finished([*line, "8", "--output-dir", "run"], tmp_path, 150, {"FLIPS": "1", "OMP_NUM_THREADS": "1"})
    assert code == 0, output
    assert re.search(
        r"world 3 -> 3 at step 16: .*after step 24 most .*but not rank 1 on \S+ in 0\.0\.weight", output
    ), output
    weights, expected = (
        torch.load(tmp_path / run / "model-final.pt", weights_only=True) for run in ("run", "undisturbed")
    )
    assert all(torch.equal(weights[name], expected[name]) for name in expected)

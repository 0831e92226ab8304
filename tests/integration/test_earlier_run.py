"""A run folder that an earlier version wrote is read, resumed and finished by this one.

run_of_version_0_1_0/ holds such a folder and the model it was trained with: SIGTERM stopped the training at step 32
of 92, in the middle of epoch 2.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.launching import HVD_TRAIN, finished, launch_line
from tests.support.runs import Weights

pytestmark = pytest.mark.integration

EARLIER = Path(__file__).parent / "run_of_version_0_1_0"
STEPS, SAMPLES = 92, 1437
TRAIN = [
    *(HVD_TRAIN, "train", "digits", "--model", "mine:model", "--epochs", "4", "--ema-decay", "0.9", "--ledger"),
    *("--output-dir", "run", "--device", "cpu", "--commit-steps", "10", "--learning-rate", "0.1"),
]

# The first 32 steps were computed on another processor, whose vector units add in another order. A gradient (at most
# about 1 long here) comes from three sums of 64 float32 terms; its rounding errors reach a weight times
# 0.1 / (1 - 0.9), the learning rate summed over the momentum's memory, and do not grow: the problem is almost convex.
# n rounding errors add up to less than 4 sqrt(n) units in all but one of 1,500 cases (Higham and Mary 2019), here
# 3e-5. Weights that resume without their momentum are off by 9e-2, without their average by 4e-4.
TOLERANCE = 4 * math.sqrt(STEPS * 3 * 64) * 2**-24 * 0.1 / (1 - 0.9)


def final_weights(folder: Path) -> Weights:
    """Return the weights that the run in `folder` ended with."""
    weights: Weights = torch.load(folder / "run" / "model-final.pt", weights_only=True)
    return weights


@pytest.mark.parametrize(
    ("launcher", "ranks", "sizes"), [("none", 1, "1"), pytest.param("gloo", 2, "1, 2", marks=pytest.mark.slow)]
)
def test_an_earlier_run_is_shown_and_resumed(launcher: str, ranks: int, sizes: str, tmp_path: Path) -> None:
    """`report` and `watch` show it; the same command continues in mid-epoch, on one rank or two, exactly."""
    earlier, whole = Path(shutil.copytree(EARLIER, tmp_path / "earlier")), tmp_path / "undisturbed"
    whole.mkdir()
    shutil.copy(EARLIER / "mine.py", whole)
    code, output = finished([*TRAIN, "--global-batch-size", "64", "--batch-size", "64"], whole)
    assert code == 0, output
    code, output = finished([HVD_TRAIN, "watch", "run", "--once"], earlier)
    assert code == 0, output
    assert "epoch 2 of 4, step 30" in output
    code, output = finished([HVD_TRAIN, "report", "run", "--no-predictions"], earlier)
    assert code == 0, output
    assert "stopped by SIGTERM at step 32" in (earlier / "report.html").read_text()
    code, output = finished(launch_line(launcher, ranks, *TRAIN), earlier)
    assert code == 0, output
    assert "64 images a step in 1 slot of 64" in output, "the cut is not that of the earlier run"
    assert "going on at epoch 2, step 32" in output
    summary = json.loads((earlier / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["epochs"], summary["finished"]) == (STEPS, 4, True)
    code, output = finished([HVD_TRAIN, "audit", "run"], earlier)
    assert code == 0, output
    assert f"every one of {SAMPLES:,} samples counted once in each of 4 finished epochs" in output
    assert f"({STEPS} steps, world sizes {sizes})" in output
    weights, expected = final_weights(earlier), final_weights(whole)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=TOLERANCE, rtol=0.0, msg=lambda m, n=name: f"{n}: {m}")

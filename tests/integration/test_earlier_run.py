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
# about 1 long here) is the outcome of three sums of 64 float32 terms: features into a logit, samples into the
# statistics of a batch, samples into the gradient. Its rounding errors reach a weight times 0.1 / (1 - 0.9), which is
# the learning rate summed over the momentum's memory, and do not grow from step to step: the problem is almost convex.
# n rounding errors add up to less than 4 sqrt(n) units in all but one of 1,500 cases (Higham and Mary 2019), here
# 3e-5. Weights that resume without their momentum are off by 9e-2, without their average by 4e-4.
TOLERANCE = 4 * math.sqrt(STEPS * 3 * 64) * 2**-24 * 0.1 / (1 - 0.9)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A folder with a copy of the earlier run and its model, to be used as the current folder."""
    return Path(shutil.copytree(EARLIER, tmp_path / "earlier"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The final weights of the same command, trained by this version from the first step to the last.

    Its cut is that of the earlier run, which took a global batch on one rank in one slot.
    """
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copy(EARLIER / "mine.py", folder)
    code, output = finished([*TRAIN, "--global-batch-size", "64", "--batch-size", "64"], folder)
    assert code == 0, output
    return final_weights(folder)


def final_weights(folder: Path) -> Weights:
    """Return the weights that the run in `folder` ended with."""
    weights: Weights = torch.load(folder / "run" / "model-final.pt", weights_only=True)
    return weights


@pytest.mark.parametrize(("launcher", "ranks", "sizes"), [("none", 1, "1"), ("gloo", 2, "1, 2")])
def test_an_earlier_run_is_resumed(launcher: str, ranks: int, sizes: str, earlier: Path, undisturbed: Weights) -> None:
    """The same command goes on in mid-epoch, on one rank or two: no sample is lost or doubled, the weights agree."""
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
    weights = final_weights(earlier)
    assert weights.keys() == undisturbed.keys()
    for name, expected in undisturbed.items():
        torch.testing.assert_close(weights[name], expected, atol=TOLERANCE, rtol=0.0, msg=lambda m, n=name: f"{n}: {m}")


def test_an_earlier_run_is_shown(earlier: Path) -> None:
    """`report` and `watch` read its settings, metrics and end before it is resumed, and leave the folder as it is."""
    before = sorted(earlier.joinpath("run").rglob("*"))
    code, output = finished([HVD_TRAIN, "report", "run", "--no-predictions"], earlier)
    assert code == 0, output
    page = (earlier / "report.html").read_text()
    assert "stopped by SIGTERM at step 32" in page
    assert "mine:model" in page
    code, output = finished([HVD_TRAIN, "watch", "run", "--once"], earlier)
    assert code == 0, output
    assert "stopped; the same command goes on from there" in output
    assert "epoch 2 of 4, step 30" in output
    assert sorted(earlier.joinpath("run").rglob("*")) == before

"""A training on two ranks that keeps reduced images, and one that finds them kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import jpegs
from tests.support.launching import HVD_TRAIN, finished, launch_line
from tests.support.runs import Weights, equal

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]


def trained(folder: Path, name: str) -> Weights:
    """Train on two ranks in a new run folder, with a cache in `cache`, and return the final weights."""
    settings = "--data folder --data-dir data --image-size 16 -a resnet18 -b 10 --epochs 2 --workers 1 --cache disk"
    command = [HVD_TRAIN, "train", *settings.split(), "--device", "cpu", "--cache-dir", "cache"]
    code, output = finished(launch_line("gloo", 2, *command, "--output-dir", name), folder)
    assert code == 0, output
    weights: Weights = torch.load(folder / name / "model-final.pt", weights_only=True)
    return weights


def test_a_model_is_the_same_whether_its_images_were_kept_or_not(tmp_path: Path) -> None:
    """Two ranks fill one cache in the first epoch; with all, or some, or no image in it the weights are the same."""
    jpegs.digits(tmp_path / "data", range(2), most=20)
    first = trained(tmp_path, "first")
    kept = sorted((tmp_path / "cache").glob("*/*/??/*"))
    assert len(kept) == len(list((tmp_path / "data").glob("*/*/*.jpg")))
    written = [path.stat().st_mtime_ns for path in kept]
    for path in kept[::2]:
        path.unlink()
    assert equal(trained(tmp_path, "second"), first)
    assert [path.stat().st_mtime_ns for path in kept[1::2]] == written[1::2]
    assert all(path.exists() for path in kept)

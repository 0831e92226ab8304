"""Trainings on two ranks from tar shards and saved data sets: exact to the sample, also when they are stopped."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.support import jpegs, saved, shards
from tests.support.launching import HVD_TRAIN, finished, launch_line
from tests.support.runs import Weights, equal

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
IMAGES = "--model tests.support.stopping:of_images --image-size 24"
TOKENS = "--task language-model --task-args vocabulary=50 --model tests.support.stopping:of_tokens"
SETS = {
    "folder": f"--data folder --data-dir images {IMAGES}",
    "webdataset": f"--data webdataset --data-dir shards {IMAGES}",
    "images": f"--data hf:saved {IMAGES}",
    "tokens": f"--data hf:tokens {TOKENS}",
}
STEPS = 5  # of an epoch


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 40 images, in class folders, shards and Arrow files, and with 40 rows of tokens."""
    here = tmp_path_factory.mktemp("data")
    folder = jpegs.digits(here / "images", range(2), most=20)
    shards.of_folder(folder, here / "shards")
    saved.of_folder(folder, here / "saved", {"train": "train", "val": "validation"})
    rows = [[(7 * row + place * row) % 50 for place in range(9)] for row in range(40)]
    saved.save(here / "tokens", {"train": {"input_ids": rows}, "validation": {"input_ids": rows[:8]}})
    code, output = finished([HVD_TRAIN, "index", "shards"], here)
    assert code == 0, output
    return here


def train(place: Path, kind: str, name: str, ranks: int = 2) -> tuple[int, str]:
    line = f"train digits {SETS[kind]} --epochs 2 --global-batch-size 8 --batch-size 4 --lr 0.01 --workers 1 --ledger"
    command = [HVD_TRAIN, *line.split(), "--device", "cpu", "--compression", "none", "--output-dir", name]
    return finished(launch_line("gloo", ranks, *command), place, 300, {"PYTHONPATH": str(ROOT)})


def weights(place: Path, name: str) -> Weights:
    found: Weights = torch.load(place / name / "model-final.pt", weights_only=True)
    return found


def audited(place: Path, name: str) -> None:
    code, output = finished([HVD_TRAIN, "audit", name], place)
    assert code == 0, output
    assert "every one of 40 samples counted once in each of 2 finished epochs" in output


@pytest.mark.parametrize("kind", ["webdataset", "images", "tokens"])
def test_a_run_that_is_stopped_goes_on_to_the_bit(place: Path, kind: str) -> None:
    """Stopped in mid epoch and resumed, two ranks end with the weights of those that were not, and count each once."""
    code, output = train(place, kind, f"{kind}-whole")
    assert code == 0, output
    audited(place, f"{kind}-whole")
    (place / "stop").write_text(str(STEPS + 2))
    code, output = train(place, kind, f"{kind}-stopped")
    assert code == 128 + 15, output
    stopped_at = re.findall(r"at step (\d+), committed", output)
    assert stopped_at and STEPS < int(stopped_at[0]) < 2 * STEPS, output
    shutil.copytree(place / f"{kind}-stopped", place / f"{kind}-alone")
    code, output = train(place, kind, f"{kind}-stopped")
    assert code == 0, output
    audited(place, f"{kind}-stopped")
    assert equal(weights(place, f"{kind}-stopped"), weights(place, f"{kind}-whole"))
    code, output = train(place, kind, f"{kind}-alone", ranks=1)
    assert code == 0, output
    audited(place, f"{kind}-alone")


def test_a_model_does_not_see_where_its_images_lie(place: Path) -> None:
    """With the same images in class folders, in shards and in Arrow files, two ranks end with the same weights."""
    for kind in ("folder", "webdataset", "images"):
        code, output = train(place, kind, f"{kind}-same")
        assert code == 0, output
    same = [weights(place, f"{kind}-same") for kind in ("folder", "webdataset", "images")]
    assert equal(same[0], same[1])
    assert equal(same[0], same[2])

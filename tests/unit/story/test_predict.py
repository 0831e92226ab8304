"""What a trained model says about images."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train import evaluate, predict, recipes, train
from hvd_train.data import image_files
from tests.support.jpegs import digits


@pytest.fixture
def run() -> Path:
    """A run of an epoch on class folders."""
    images = digits(Path("images"), range(4), most=12, test=True)
    config = recipes.digits().replace(data="folder", data_dir=images, image_size=8, global_batch_size=16, workers=0)
    train(config.replace(epochs=1, device="cpu", warmup_epochs=0.0, learning_rate=0.01, output_dir=Path("run")))
    return Path("run")


def test_files_and_the_set_that_they_are_of_get_the_same(run: Path) -> None:
    """Probabilities to the bit, which add up to one over all classes; a set has the true classes as well."""
    of_set = list(predict.of_split(run, "val", top=4, device="cpu", trust=False))
    files = image_files.find([Path("images/val")])
    of_files = list(predict.of_files(run, files, top=4, device="cpu", trust=False))
    assert [one.image for one in of_files] == [one.image for one in of_set] == [str(file) for file in files]
    assert [one.best for one in of_files] == [one.best for one in of_set]
    assert [one.truth for one in of_set] == [file.parent.name for file in files]
    assert {one.truth for one in of_files} == {None}
    for one in of_files:
        assert sum(share for _, share in one.best) == pytest.approx(1, abs=1e-6)
        assert [share for _, share in one.best] == sorted((share for _, share in one.best), reverse=True)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_the_first_classes_are_as_often_right_as_evaluation_says(run: Path, split: str) -> None:
    """Of each set, of which training images come as evaluation sees them."""
    said = list(predict.of_split(run, split, top=1, device="cpu", trust=False))  # type: ignore[arg-type]
    right = sum(one.best[0][0] == one.truth for one in said)
    scores = evaluate(run, device="cpu", split=split)  # type: ignore[arg-type]
    assert (right / len(said), len(said)) == (pytest.approx(scores["top1"]), scores.count)
    assert len(said) == {"train": 48, "val": 48, "test": 48}[split]

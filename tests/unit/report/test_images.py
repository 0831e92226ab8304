"""Images of `hvd-train show-data`, and misclassified images."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvd_train import cli, recipes
from hvd_train.data import sources
from hvd_train.data.dataset import Arrays
from hvd_train.progress.order import EpochOrder
from hvd_train.report.images import predict, show
from hvd_train.run import train
from tests.support import jpegs


def test_the_picture_has_the_first_images_and_the_table_the_classes_of_each_rank() -> None:
    config = recipes.digits().replace(augment="none")
    shown = show(config, 3, Path("seen.png"))
    data = sources.open_data(config.data, config.seed).train
    assert isinstance(data, Arrays)
    first = EpochOrder(config.seed, 0, len(data))[0:9]
    picture = np.asarray(Image.open("seen.png").convert("L"), dtype=float)
    for number in (0, 1, 7):
        left, top = number % 8 * 96, number // 8 * 110
        middle = picture[top + 6 : top + 94 : 12, left + 6 : left + 94 : 12][:8, :8]
        expected = data.images[first[number], 0].float().numpy()
        assert np.abs(middle - expected).max() <= 1.0
    head, *rows, last = shown.splitlines()
    assert (head.split(), last) == (["rank", "0", "rank", "1", "rank", "2"], "picture: seen.png")
    counts = np.array([[int(number) for number in row.split()[1:]] for row in rows])
    assert counts.sum(axis=1).tolist() == np.bincount(data.labels).tolist()
    assert counts.sum(axis=0).min() > 300


def test_jpeg_files_with_each_augmentation(capsys: pytest.CaptureFixture[str]) -> None:
    """A symlink with the name of the picture is replaced; control characters in class names are, too."""
    Path("outside").write_text("precious")
    Path("show-data.png").symlink_to("outside")
    jpegs.digits(Path("data"), range(3), most=8)
    for split in Path("data").iterdir():
        (split / "00").rename(split / "a\x1b[2J\nb")
    line = "show-data imagenet-resnet50-modern --data-dir data --image-size 32 -b 8 --workers-per-host 0 --ranks 2"
    assert cli.run(line.split()) == 0
    _, *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["01", "02", "a\ufffd[2J\ufffdb"]
    assert last == "picture: show-data.png"
    assert Image.open("show-data.png").format == "PNG"
    assert Path("outside").read_text() == "precious"


def test_predictions_add_up_to_the_best_score() -> None:
    result = train(recipes.digits().replace(epochs=1, device="cpu", workers=0, output_dir=Path("run")))
    predictions = predict(Path("run"), "cpu", trust=True)
    right = sum(count for (truth, predicted), count in predictions.counts.items() if truth == predicted)
    assert sum(predictions.counts.values()) == 360
    assert right / 360 == pytest.approx(result.best["top1"])
    losses = [image.loss for image in predictions.worst]
    assert len(losses) == 12
    assert losses == sorted(losses, reverse=True)
    for image in predictions.worst:
        assert image.truth != image.predicted
        assert 0 < image.confidence <= 1
        assert image.png.startswith(b"\x89PNG")

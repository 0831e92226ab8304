"""Images of `hvd-train show-data`."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvd_train import cli, recipes
from hvd_train.data import sources
from hvd_train.data.dataset import Arrays
from hvd_train.progress.order import EpochOrder
from hvd_train.report.images import show
from tests.support import jpegs


def test_the_picture_has_the_first_images() -> None:
    config = recipes.digits().replace(augment="none")
    show(config, Path("seen.png"))
    data = sources.open_data(config.data, config.seed).train
    assert isinstance(data, Arrays)
    first = EpochOrder(config.seed, 0, len(data))[0:9]
    picture = np.asarray(Image.open("seen.png").convert("L"), dtype=float)
    for number in (0, 1, 7):
        left, top = number % 8 * 96, number // 8 * 110
        middle = picture[top + 6 : top + 94 : 12, left + 6 : left + 94 : 12][:8, :8]
        expected = data.images[first[number], 0].float().numpy()
        assert np.abs(middle - expected).max() <= 1.0


def test_jpeg_files_with_each_augmentation(capsys: pytest.CaptureFixture[str]) -> None:
    """A symlink with the name of the picture is replaced."""
    Path("outside").write_text("precious")
    Path("show-data.png").symlink_to("outside")
    jpegs.digits(Path("data"), range(3), most=8)
    for split in Path("data").iterdir():
        (split / "00").rename(split / "a\x1b[2J\nb")
    line = "show-data imagenet-resnet50-modern --data-dir data --image-size 32 -b 8 --workers-per-host 0"
    assert cli.run(line.split()) == 0
    assert capsys.readouterr().out == "picture: show-data.png\n"
    assert Image.open("show-data.png").format == "PNG"
    assert Path("outside").read_text() == "precious"

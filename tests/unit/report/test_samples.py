"""What a training would see, shown before it starts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hvd_train import recipes
from hvd_train.cli import run
from hvd_train.data import sources
from hvd_train.data.dataset import Arrays
from hvd_train.progress.order import EpochOrder
from hvd_train.report.samples import Preview, show
from tests.support import jpegs


def test_the_first_images_in_their_order() -> None:
    """Without random changes the picture holds the very images that the first step takes."""
    config = recipes.digits().replace(augment="none")
    show(config, 1, Path("seen.png"))
    train = sources.open_data(config.data, config.seed).train
    assert isinstance(train, Arrays)
    first = EpochOrder(config.seed, 0, len(train))[0:9]
    picture = np.asarray(Image.open("seen.png").convert("L"), dtype=float)
    assert picture.shape == (8 * 110, 8 * 96)
    for number in (0, 1, 8):
        left, top = number % 8 * 96, number // 8 * 110
        middle = picture[top + 6 : top + 94 : 12, left + 6 : left + 94 : 12][:8, :8]
        expected = train.inputs[first[number], 0].float().numpy()
        assert np.abs(middle - expected).max() <= 1.0


def test_each_rank_has_its_share() -> None:
    """All samples, once: the columns add up to the classes of the whole set."""
    config = recipes.digits()
    shown = show(config, 3, Path("seen.png"))
    train = sources.open_data(config.data, config.seed).train
    assert isinstance(train, Arrays)
    assert sum(shown.rank_counts, Counter()) == Counter(train.targets.tolist())
    assert min(counts.total() for counts in shown.rank_counts) > 300
    assert [line.split()[0] for line in str(shown).splitlines()[1:-1]] == list(train_classes())


def test_names_of_classes_do_not_act_on_the_terminal() -> None:
    """They are names of folders, which anybody may have made."""
    told = str(Preview(Path("seen.png"), ("a\x1b[2J\nb",), (Counter({0: 3}),)))
    assert told.splitlines()[1:] == ["a\ufffd[2J\ufffdb         3", "picture: seen.png"]


def train_classes() -> tuple[str, ...]:
    return tuple(str(number) for number in range(10))


def test_mixed_images_bear_both_labels(capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line, of JPEG files, with every change there is."""
    jpegs.digits(Path("data"), range(3), most=8)
    line = "show-data imagenet-resnet50-modern --data-dir data --image-size 32 -b 8 --workers-per-host 0 --ranks 2"
    assert run(line.split()) == 0
    assert "picture: show-data.png" in capsys.readouterr().out
    assert Image.open("show-data.png").size == (8 * 96, 3 * 110)


def test_a_link_is_not_drawn_into(capsys: pytest.CaptureFixture[str]) -> None:
    """The picture has a name that everybody knows: a link of that name is replaced."""
    Path("outside").write_text("precious")
    Path("show-data.png").symlink_to("outside")
    assert run(["show-data"]) == 0
    assert Path("outside").read_text() == "precious"
    assert Image.open("show-data.png").format == "PNG"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--output", "seen"], "--output seen: unknown file extension ''"),
        (["--ranks", "0"], "--ranks 0: it must be a whole number from 1 on"),
        (["--ranks"], "--ranks needs a number"),
        (["--output", "seen.nothing"], "--output seen.nothing: unknown file extension"),
        (["--output", "no/folder.png"], "--output no/folder.png:"),
        (["--global-batch-size", "5000"], "a global batch of 5000 samples is larger"),
    ],
)
def test_what_cannot_be_shown(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2."""
    assert run(["show-data", *arguments]) == 2
    assert reason in capsys.readouterr().err
    assert torch.is_grad_enabled()

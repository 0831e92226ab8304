"""Views of encoded images, which are those of torchvision to the bit."""

from __future__ import annotations

import pytest
import torch
from torchvision.transforms import v2

from hvd_train.data import pictures, views
from hvd_train.data.pictures import Picture
from hvd_train.data.views import CenterCrop, RandomCrop
from hvd_train.settings.data import DataConfig
from tests.support.jpegs import encoded, noise, whole


@pytest.fixture
def bytes_are_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torchvision resize bytes as such; on processors without AVX2 it would make them floating-point numbers."""
    monkeypatch.setattr(v2.functional._geometry, "_do_native_uint8_resize_on_cpu", lambda interpolation: True)


@pytest.mark.usefixtures("bytes_are_resized")
@pytest.mark.parametrize("compiled", [True, False])
def test_random_crops_are_those_of_torchvision(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same random numbers give the same image to the bit, for images of any shape, by either decoder."""
    if not compiled:
        monkeypatch.setattr(pictures, "region_library", lambda: None)
    usual = v2.Compose([v2.RandomResizedCrop(24, antialias=True), v2.RandomHorizontalFlip()])
    ours = RandomCrop(24)
    for width, height in (
        (500, 375),
        (33, 47),
        (300, 20),
        (9, 120),
    ):  # no part of the last two fits: the middle is taken
        data = encoded(noise(width, height), quality=90)
        picture, expected = Picture(data), whole(data)
        for seed in range(25):
            torch.manual_seed(seed)
            found = ours(picture)
            torch.manual_seed(seed)
            assert torch.equal(found, usual(expected)), (width, height, seed)


@pytest.mark.usefixtures("bytes_are_resized")
def test_the_middle_is_that_of_torchvision() -> None:
    """Evaluation sees what torchvision's Resize and CenterCrop make of the whole image."""
    data = encoded(noise(250, 190))
    usual = v2.Compose([v2.Resize(64, antialias=True), v2.CenterCrop(56)])
    assert torch.equal(CenterCrop(64, 56)(Picture(data)), usual(whole(data)))


def test_settings_decide_what_training_and_evaluation_see() -> None:
    """Evaluation sees the middle 224 of 256 pixels unless told otherwise; training a random part, or the middle."""
    config = DataConfig(data="webdataset", data_dir=".", image_size=112)  # type: ignore[arg-type]
    assert views.file_view(config) == (128, 112)
    assert isinstance(views.of_training(config).view, RandomCrop)
    plain = DataConfig(
        data="hf:x", augment="none", val_crop_size=32, val_resize_size=40, max_image_pixels=9, decode="gpu"
    )
    assert views.file_view(plain) == (40, 32)
    for look in (views.of_training(plain), views.of_evaluation(plain)):
        assert isinstance(look.view, CenterCrop)
        assert (look.max_pixels, look.for_gpu) == (9, True)

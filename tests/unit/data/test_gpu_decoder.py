"""What a GPU does to decoded images, and what is said where it does not decode; tests/integration/fake_gpu has more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hvd_train.data import gpu_decoder
from hvd_train.data.coded import MOST_SHRUNK, Frame
from hvd_train.data.encoded import View, suits_gpu
from hvd_train.data.pictures import Picture
from hvd_train.data.views import CenterCrop, RandomCrop
from hvd_train.errors import UsageError
from tests.support.batches import CPU
from tests.support.jpegs import encoded, noise, whole


@pytest.mark.parametrize("view", [RandomCrop(24), CenterCrop(32, 28)], ids=["random", "center"])
def test_what_is_seen_differs_by_one_from_the_cpus(view: View) -> None:
    """Resized in floating point and rounded once, images are the CPU's or differ by 1 of 255."""
    for width, height in ((500, 375), (33, 47), (300, 20), (28, 32)):
        data = encoded(noise(width, height), quality=90)
        for seed in range(10):
            torch.manual_seed(seed)
            frame = view.frame(Picture(data))
            found = gpu_decoder.seen(whole(data), frame)
            assert torch.equal(found, found.to(torch.uint8).float()), "whole numbers"
            assert (found - Picture(data).seen(frame).float()).abs().max() <= 1, (width, height, seed)


def test_a_view_of_its_own_size_is_the_cpus_to_the_bit() -> None:
    """Where nothing is resized, mirrored or not, nothing differs."""
    data = encoded(noise(40, 30))
    for mirrored in (False, True):
        frame = Frame(5, 3, 20, 20, 20, 20, 2, 1, 16, mirrored)
        assert torch.equal(gpu_decoder.seen(whole(data), frame), Picture(data).seen(frame).float())


def test_the_header_decides_who_decodes() -> None:
    """A GPU gets plain files that it can shrink and whose pixels fit; all others are the CPU's."""
    frame = Frame(0, 0, 40, 30, 16, 16, 0, 0, 16, mirrored=False)
    assert suits_gpu(Picture(encoded(noise(40, 30))), frame)
    assert not suits_gpu(Picture(encoded(noise(40, 30), progressive=True)), frame)
    assert not suits_gpu(Picture(encoded(noise(40, 30), "png")), frame)
    wide = Picture(encoded(noise(16 * MOST_SHRUNK + 1, 16)))
    assert suits_gpu(wide, frame._replace(width=16 * MOST_SHRUNK))
    assert not suits_gpu(wide, frame._replace(width=16 * MOST_SHRUNK + 1))
    assert not suits_gpu(wide, frame._replace(height=16 * MOST_SHRUNK + 1))
    large = Picture(encoded(noise(40, 30)))
    large.width, large.height = 1 << 12, (1 << 12) + 1
    assert not suits_gpu(large, frame)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("not compiled\nwith it")])
def test_a_gpu_that_does_not_decode_is_one_line(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the flag, the reason and what to type; too little memory is told by those who know of memory."""

    def fails(files: list[Tensor], device: torch.device) -> list[Tensor]:
        raise error

    monkeypatch.setattr(gpu_decoder, "decode", fails)
    expected = UsageError if type(error) is RuntimeError else torch.OutOfMemoryError
    with pytest.raises(expected) as caught:
        gpu_decoder.check(CPU)
    if expected is UsageError:
        assert str(caught.value).startswith("--decode gpu: torchvision cannot decode on cpu (not compiled); install ")
        assert str(caught.value).endswith("or type --decode cpu")


def test_headers_that_cannot_be_read_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without our part in C no file would come to the GPU, and nobody would know."""
    monkeypatch.setattr(gpu_decoder, "region_library", lambda: None)
    with pytest.raises(UsageError, match=r"--decode gpu needs .* in C.*hvd-train doctor.* --decode cpu"):
        gpu_decoder.check(CPU)

"""Batches of which some images are still files."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hvd_train.data import coded
from hvd_train.data.coded import MOST_PIXELS, Coded, CodedBatch, Frame, Request


def file(content: bytes, num_pixels: int = 100) -> Coded:
    """Return a file with this content."""
    frame = Frame(0, 0, 10, 10, 2, 2, 0, 0, 2, mirrored=False)
    return Coded(torch.tensor([*content], dtype=torch.uint8), Request(frame, num_pixels, f"{content[0]}.jpg"))


PIXELS = torch.arange(12, dtype=torch.uint8).view(2, 2, 3).permute(2, 0, 1)  # colours side by side


def contents(batch: CodedBatch) -> tuple[list[tuple[int, list[int]]], dict[int, Tensor]]:
    """Return the files and the pixels of a batch by their numbers."""
    files = [(number, image.content.tolist()) for group in batch.files() for number, image in group]
    return files, dict(batch.pixels())


@pytest.mark.parametrize("size", [None, 12, 18, 30])
def test_each_image_is_found_again(size: int | None) -> None:
    """Files and pixels come back whole and in their places, whether the batch fits into its buffer or not."""
    buffer = None if size is None else torch.full((size,), 99, dtype=torch.uint8)
    batch = coded.join([file(b"abc"), PIXELS, file(b"xyz")], buffer)
    files, pixels = contents(batch)
    assert files == [(0, [*b"abc"]), (2, [*b"xyz"])]
    assert list(pixels) == [1]
    assert torch.equal(pixels[1], PIXELS)
    assert batch.nbytes == 3 * 12
    lent = buffer is not None and batch.content.data_ptr() == buffer.data_ptr()
    assert lent == (size in (18, 30))


def test_files_are_decoded_in_groups_of_so_many_pixels() -> None:
    """No group has more than the limit, unless it is one file, and no file is left out or changes its place."""
    half, most = MOST_PIXELS // 2, MOST_PIXELS
    batch = coded.join([file(b"a", half), file(b"b", half), file(b"c", 1), PIXELS, file(b"d", most)], None)
    assert [[number for number, _ in group] for group in batch.files()] == [[0, 1], [2], [4]]

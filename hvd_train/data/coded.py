"""Images that leave a loader process as files, because a GPU is to decode them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

MOST_PIXELS = 1 << 24
"""Pixels of the images that a GPU decodes at a time, 50 MB of its memory; a larger image is decoded by the CPU."""
MOST_SHRUNK = 64
"""How many times a GPU shrinks the part of an image; where it is more, the CPU does all. Torch's kernel ends at 90."""


class Frame(NamedTuple):
    """What the model sees of an image: a part of it, resized, of that a square window, and whether it is mirrored."""

    left: int
    top: int
    width: int
    height: int
    resized_height: int
    resized_width: int
    window_top: int
    window_left: int
    side: int
    mirrored: bool

    def window(self, resized: Tensor) -> Tensor:
        """Return what is seen [3, side, side] of the resized part [3, resized_height, resized_width]."""
        top, left = self.window_top, self.window_left
        window = resized[:, top : top + self.side, left : left + self.side]
        return window.flip(-1) if self.mirrored else window


class Request(NamedTuple):
    """What is asked of a GPU for a file of so many pixels; the path is for an error."""

    frame: Frame
    num_pixels: int
    path: str


class Coded(NamedTuple):
    """The content of a JPEG file [bytes] uint8, and what is asked for."""

    content: Tensor
    request: Request


@dataclass(frozen=True)
class CodedBatch:
    """The images of a batch, some as files and some as pixels.

    `content` [bytes] has the file or the pixels [3, side, side] of each image, one after the other, and `sizes` the
    number of its bytes. The request for pixels is None.
    """

    content: Tensor
    sizes: tuple[int, ...]
    requests: tuple[Request | None, ...]
    side: int

    @property
    def nbytes(self) -> int:
        """The bytes that the images will have as pixels: about those of the files, which all differ."""
        return len(self.sizes) * 3 * self.side * self.side

    def pin_memory(self, device: str = "") -> CodedBatch:
        """Return the same batch in memory that a GPU can read by itself; DataLoader calls it."""
        return replace(self, content=self.content.pin_memory())

    def pixels(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the number in the batch and the pixels [3, side, side] of each image that is not a file."""
        for number, (content, request) in enumerate(self._images()):
            if request is None:
                yield number, content.view(3, self.side, self.side)

    def files(self) -> Iterator[list[tuple[int, Coded]]]:
        """Yield the files with their numbers in the batch, in groups of at most MOST_PIXELS."""
        group: list[tuple[int, Coded]] = []
        num_pixels = 0
        for number, (content, request) in enumerate(self._images()):
            if request is None:
                continue
            if group and num_pixels + request.num_pixels > MOST_PIXELS:
                yield group
                group, num_pixels = [], 0
            group.append((number, Coded(content, request)))
            num_pixels += request.num_pixels
        if group:
            yield group

    def _images(self) -> Iterator[tuple[Tensor, Request | None]]:
        return zip(self.content.split_with_sizes([*self.sizes]), self.requests, strict=True)


def join(images: Sequence[Tensor | Coded], buffer: Tensor | None) -> CodedBatch:
    """Return a batch of images, of which at least one is a file, in the buffer where they fit into it."""
    contents = [image.content if isinstance(image, Coded) else image.contiguous().view(-1) for image in images]
    requests = tuple(image.request if isinstance(image, Coded) else None for image in images)
    sizes = tuple(len(content) for content in contents)
    side = next(request.frame.side for request in requests if request is not None)
    fits = buffer is not None and sum(sizes) <= len(buffer)
    content = torch.cat(contents, out=buffer[: sum(sizes)]) if buffer is not None and fits else torch.cat(contents)
    return CodedBatch(content, sizes, requests, side)

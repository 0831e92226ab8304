"""Images that are kept encoded, one by one: how the model sees them, wherever their bytes are."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hvd_train.data.coded import MOST_PIXELS, MOST_SHRUNK, Coded, Frame, Request
from hvd_train.data.dataset import Mark, Staged, unmarked
from hvd_train.data.pictures import UNREADABLE, Picture, Pixels
from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig


class View(ABC):
    """What the model sees of an image file: a part of it, of one size."""

    @abstractmethod
    def frame(self, picture: Picture | Pixels) -> Frame:
        """Return where that is, by random numbers if need be."""

    def __call__(self, picture: Picture | Pixels) -> Tensor:
        """Return an image [3, size, size] uint8."""
        return picture.seen(self.frame(picture))


@dataclass(frozen=True)
class Look:
    """How images of a set are seen: in which view, and what is done to each after that.

    Images of more than `max_pixels` pixels count as unreadable. With `for_gpu`, `staged_item` does not decode what a
    GPU can decode; there is no `transform` then.
    """

    view: View
    transform: Any = None
    max_pixels: int = DataConfig.max_image_pixels
    for_gpu: bool = False


class EncodedImages(Staged, ABC):
    """A set of encoded images; an item is (image [3, size, size] uint8, class number). No image is kept in memory.

    What is known of each image is in tensors, which loader processes share. To read from lists would write to the
    reference counts of their entries, so that each process would soon have a copy of every page.
    """

    def __init__(self, labels: Tensor, look: Look) -> None:
        self.labels, self._look = labels, look

    @abstractmethod
    def name(self, index: int) -> str:
        """Return what an image is called in errors and tables."""

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return the content of an image's file. Raises UNREADABLE."""

    @override
    def __len__(self) -> int:
        return len(self.labels)

    def seen_with(self, look: Look) -> EncodedImages:
        """Return the same images, seen in another way."""
        images = copy.copy(self)
        images._look = look
        return images

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an item. Raises UsageError that names the image where it cannot be read as one."""
        image = self._image(index, unmarked, for_gpu=False)
        assert isinstance(image, Tensor)
        return image, int(self.labels[index])

    @override
    def staged_item(self, index: int, mark: Mark) -> tuple[Tensor | Coded, int]:
        """Return an item and call `mark` after "read", "decode" and "augment", or "read" and "header" of a file.

        Raises UsageError, naming the image, where it cannot be read.
        """
        return self._image(index, mark, for_gpu=self._look.for_gpu), int(self.labels[index])

    def _image(self, index: int, mark: Mark, *, for_gpu: bool) -> Tensor | Coded:
        try:
            image = self._seen(index, mark, for_gpu=for_gpu)
        except UNREADABLE as error:
            raise unreadable(self.name(index), error) from None
        if isinstance(image, Coded):
            return image
        image = image if self._look.transform is None else self._look.transform(image)
        mark("augment")
        return image

    def _seen(self, index: int, mark: Mark, *, for_gpu: bool) -> Tensor | Coded:
        """Return what the model sees of an image, or the file where a GPU is to decode it. Raises UNREADABLE."""
        data = self.read(index)
        mark("read")
        picture = Picture(data, self._look.max_pixels)
        frame = self._look.view.frame(picture)
        if for_gpu and suits_gpu(picture, frame):
            request = Request(frame, picture.width * picture.height, self.name(index))
            mark("header")
            return Coded(torch.frombuffer(bytearray(data), dtype=torch.uint8), request)
        image = picture.seen(frame)
        mark("decode")
        return image


class Texts:
    """Many texts in two tensors, which loader processes share."""

    def __init__(self, joined: bytes, ends: Tensor) -> None:
        """Take texts that are one after the other, and where each ends, int64 [texts]."""
        self._joined = torch.frombuffer(bytearray(joined or b"\0"), dtype=torch.uint8)  # which takes no empty buffer
        self._ends = ends

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> Texts:
        """Return these texts."""
        texts = [*texts]
        return cls(b"".join(texts), torch.tensor([len(text) for text in texts], dtype=torch.int64).cumsum(0))

    def __getitem__(self, index: int) -> bytes:
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        text: bytes = self._joined[start:end].numpy().tobytes()
        return text


def suits_gpu(picture: Picture, frame: Frame) -> bool:
    """Return whether a GPU is to decode this image.

    The file and the frame alone decide, whatever GPU there is, so that the result does not depend on the machine.
    """
    return (
        picture.is_plain_jpeg()
        and picture.width * picture.height <= MOST_PIXELS
        and frame.width <= MOST_SHRUNK * frame.resized_width
        and frame.height <= MOST_SHRUNK * frame.resized_height
    )


def unreadable(name: str | Path, error: Exception) -> UsageError:
    """Return the error that names an image, which has raised one of UNREADABLE."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UsageError(f"cannot read the image {name}: {reason}; mend or remove it")

"""JPEG files decoded by a GPU (nvJPEG), and cropped and resized there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from hvd_train.data.coded import Coded, CodedBatch, Frame
from hvd_train.data.pictures import region_library
from hvd_train.errors import UsageError


class GpuDecoder:
    """Decodes the files of a batch on a stream of its own, so that the GPU may still be at the step before.

    torchvision's decoder writes on yet another stream, which waits for no other, into memory that torch hands out by
    the order of the current stream. That must have come to its end when the decoder is called, or images would be
    overwritten that it still resizes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in_use: CodedBatch | None = None  # its memory may be read until the stream has come to its end

    def images(self, batch: CodedBatch) -> Tensor:
        """Return the images [n, 3, side, side] uint8 of a batch, which the current stream has when it gets there.

        Raises UsageError that names a file which the GPU does not decode.
        """
        with torch.cuda.stream(self._stream):
            images = torch.empty((len(batch.sizes), 3, batch.side, batch.side), dtype=torch.uint8, device=self._device)
            for number, pixels in batch.pixels():
                images[number].copy_(pixels, non_blocking=True)
            for group in batch.files():
                self._stream.synchronize()
                wholes = self._decoded([file for _, file in group])
                for (number, file), whole in zip(group, wholes, strict=True):
                    images[number].copy_(seen(whole, file.request.frame))
        self._in_use = batch
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        images.record_stream(current)
        return images.clone()  # in memory of the current stream, as a copy from the host would be

    def _decoded(self, files: list[Coded]) -> list[Tensor]:
        """Return the pixels [3, height, width] of each file. Raises UsageError for one that cannot be decoded."""
        try:
            return decode([file.content for file in files], self._device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # it does not say of which file
            if len(files) > 1:
                return [self._decoded([file])[0] for file in files]
            raise UsageError(
                f"cannot read the image {files[0].request.path}: the GPU does not decode it ({_first_line(error)}); "
                "mend or remove it, or type --decode cpu"
            ) from None


def decode(files: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return the pixels [3, height, width] of files [bytes], for which the current stream waits."""
    from torchvision.io import ImageReadMode, decode_jpeg  # slow to import

    with _unfilled_memory(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # docs/decisions.md says why it is not TorchCodec
        wholes: list[Tensor] = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
    return wholes


@contextmanager
def _unfilled_memory() -> Iterator[None]:
    """Keep torch from writing into new memory inside the block, as it does where it is deterministic.

    It writes on the current stream, for which torchvision's decoder does not wait.
    """
    settings: Any = torch.utils.deterministic  # whose attributes are not declared
    usual = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = usual


def seen(whole: Tensor, frame: Frame) -> Tensor:
    """Return what is seen of an image [3, height, width] as whole numbers [3, side, side], in floating point.

    They are the CPU's or differ by 1: it rounds after each of the two directions in which it resizes.
    """
    part = whole[:, frame.top : frame.top + frame.height, frame.left : frame.left + frame.width]
    size = (frame.resized_height, frame.resized_width)
    resized = F.interpolate(part.float().unsqueeze(0), size=size, mode="bilinear", antialias=True)[0]
    return frame.window(resized).round_()


@cache
def decoder(device: torch.device) -> GpuDecoder:
    """Return the decoder of a GPU, which all loaders share."""
    return GpuDecoder(device)


def check(device: torch.device) -> None:
    """Raise UsageError where `device` cannot decode, or where the headers of files cannot be read."""
    if region_library() is None:
        raise UsageError(
            "--decode gpu needs the part of hvd_train in C, which reads headers: type `hvd-train doctor` for what is "
            "missing, or --decode cpu"
        )
    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    try:
        decode([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UsageError(
            f"--decode gpu: torchvision cannot decode on {device} ({_first_line(error)}); install a torchvision that "
            "was built for CUDA, with nvJPEG, as its wheels for CUDA are, or type --decode cpu"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

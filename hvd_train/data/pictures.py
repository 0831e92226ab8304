"""Image files, decoded only as far as the part that is asked for, and resized on the way."""

from __future__ import annotations

import ctypes
import struct
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from hvd_train.data import jpeg_header
from hvd_train.data.coded import Frame
from hvd_train.settings.data import DataConfig

_DAMAGED = (ValueError, TypeError, SyntaxError, EOFError, LookupError, ArithmeticError, struct.error)
UNREADABLE = (OSError, *_DAMAGED)
"""The errors that are raised for a file that is damaged, too large or not an image of a format that is meant."""
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # those of the endings that a data folder may hold
_ORIENTATION, _UPRIGHT = 0x0112, 1


class Picture:
    """The content of an image file, seen as red, green and blue pixels.

    JPEG files are decoded by the same library that Pillow uses and resized as torch does (`jpeg_region.c`), with the
    same result to the bit. Pillow itself decodes other formats, images that are to be turned or have four colours,
    damaged files, and every file if the package was installed without a compiler.
    """

    def __init__(self, data: bytes, max_pixels: int = DataConfig.max_image_pixels) -> None:
        """Look at the header of the file with this content.

        Raises UNREADABLE, also where the image has more than `max_pixels` pixels: before any of them is decoded.
        """
        self._data, self._max_pixels = data, max_pixels
        self._whole: Tensor | None = None
        self.width, self.height = _jpeg_size(data, max_pixels) or self._decode().shape[1::-1]

    def part(self, left: int, top: int, width: int, height: int) -> Tensor:
        """Return the pixels of this part as uint8 [3, height, width]. Raises UNREADABLE."""
        pixels = self._jpeg((left, top, width, height, height, width, 0, 0, height, width, 0))
        if pixels is None:
            pixels = self._decode()[top : top + height, left : left + width]
        return pixels.permute(2, 0, 1)

    def seen(self, frame: Frame) -> Tensor:
        """Return what is seen of the image in this frame as uint8 [3, side, side]. Raises UNREADABLE."""
        pixels = self._jpeg((*frame[:8], frame.side, frame.side, frame.mirrored))
        if pixels is not None:
            return pixels.permute(2, 0, 1)
        part = self.part(frame.left, frame.top, frame.width, frame.height)
        return frame.window(_resized(part, frame.resized_height, frame.resized_width))

    def reduced(self, side: int) -> Pixels:
        """Return the whole image, resized where its shorter side has more than `side` pixels. Raises UNREADABLE.

        Sides are rounded down, as torchvision's Resize does.
        """
        shorter = min(self.width, self.height)
        height, width = (int(min(side, shorter) * length / shorter) for length in (self.height, self.width))
        pixels = self._jpeg((0, 0, self.width, self.height, height, width, 0, 0, height, width, 0))
        if pixels is None:
            whole = self.part(0, 0, self.width, self.height)
            pixels = _resized(whole, height, width).permute(1, 2, 0).contiguous()
        return Pixels(pixels)

    def is_plain_jpeg(self) -> bool:
        """Return whether the file is a whole, upright JPEG of a kind that every decoder knows."""
        return self._whole is None and jpeg_header.is_plain(self._data)

    def _jpeg(self, frame: tuple[int, ...]) -> Tensor | None:
        """Return the pixels [window_height, window_width, 3] of a frame as in C; None where Pillow must decode."""
        if self._whole is not None:
            return None
        library = region_library()
        assert library is not None
        pixels = torch.empty((frame[8], frame[9], 3), dtype=torch.uint8)
        data = self._data
        has_failed = library.region_decode(data, len(data), (ctypes.c_int * 11)(*frame), pixels.data_ptr())
        return None if has_failed else pixels

    def _decode(self) -> Tensor:
        if self._whole is None:
            self._whole = _decode(self._data, self._max_pixels)
        return self._whole


class Pixels:
    """An image of which all pixels [height, width, 3] uint8 are in memory, seen as a `Picture` is."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels
        self.height, self.width = pixels.shape[:2]

    def seen(self, frame: Frame) -> Tensor:
        """Return what is seen of the image in this frame as uint8 [3, side, side]."""
        rows, columns = slice(frame.top, frame.top + frame.height), slice(frame.left, frame.left + frame.width)
        part = self.pixels[rows, columns].permute(2, 0, 1)
        return frame.window(_resized(part, frame.resized_height, frame.resized_width))


def _resized(part: Tensor, height: int, width: int) -> Tensor:
    """Return pixels [3, height, width] made of others, to the bit as in C."""
    if part.shape[1:] == (height, width):
        return part
    # Of bytes. torchvision would resize floating-point numbers on processors without AVX2.
    return F.interpolate(part[None], size=[height, width], mode="bilinear", antialias=True)[0]


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image with Pillow, whose own limit is `max_pixels` meanwhile. Raises UNREADABLE.

    Pillow warns from its limit on and refuses, before the memory of a canvas is taken, from twice its limit on.
    """
    usual, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels / 2  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(BytesIO(data), formats=_FORMATS) as image:
                yield image
    except UnidentifiedImageError:
        raise ValueError(f"it is damaged, or none of {', '.join(_FORMATS)}") from None
    except Image.DecompressionBombError:
        raise _too_many(max_pixels) from None
    finally:
        Image.MAX_IMAGE_PIXELS = usual


def _too_many(max_pixels: int) -> ValueError:
    return ValueError(f"it has more pixels than --max-image-pixels {max_pixels} allows")


def _decode(data: bytes, max_pixels: int) -> Tensor:
    """Return all pixels [height, width, 3], decoded by Pillow."""
    with _opened(data, max_pixels) as opened:
        image: Image.Image = opened
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I;16"):  # Pillow would cut the values off at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return torch.from_numpy(np.array(image if image.mode == "RGB" else image.convert("RGB")))


def _jpeg_size(data: bytes, max_pixels: int) -> tuple[int, int] | None:
    """Return width and height of a complete, upright JPEG file, or None where Pillow must look at the file.

    Raises UNREADABLE where there are too many pixels as libjpeg itself reads the header, whoever decodes them.
    """
    library, size = region_library(), (ctypes.c_int * 2)()
    if library is None or not data.startswith(jpeg_header.START) or library.region_size(data, len(data), size):
        return None
    width, height = size
    if width * height > max_pixels:
        raise _too_many(max_pixels)
    # A file that was cut off has no end marker. Its first rows alone could be decoded without a sign of that.
    return (width, height) if data.endswith(jpeg_header.END) and _is_upright(data, max_pixels) else None


def _is_upright(data: bytes, max_pixels: int) -> bool:
    """Return False where an Exif segment says that the image is to be turned, or may say so."""
    try:
        if not jpeg_header.has_exif(data):
            return True
    except ValueError:
        return False
    with _opened(data, max_pixels) as image:
        return bool(image.getexif().get(_ORIENTATION, _UPRIGHT) == _UPRIGHT)


@cache
def region_library() -> ctypes.CDLL | None:
    """Return the decoder of parts, or None where it was not compiled or Pillow has brought no libjpeg-turbo for it."""
    compiled = Path(__file__).with_name("jpeg_region" + str(sysconfig.get_config_var("EXT_SUFFIX")))
    if not compiled.is_file():
        return None
    library = ctypes.CDLL(str(compiled))
    declare(library)
    return library if library.region_library(library_path().encode()) else None


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes what the functions of `jpeg_region.c` take."""
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    library.region_library.argtypes = [ctypes.c_char_p]
    library.region_size.argtypes = [ctypes.c_char_p, size, pointer]
    library.region_decode.argtypes = [ctypes.c_char_p, size, pointer, pointer]


def library_path() -> str:
    """Return the path or name of libjpeg-turbo.

    Wheels of Pillow bring it in a folder of their own; a Pillow built on the machine uses the machine's.
    """
    bundled = sorted((Path(PIL.__file__).parents[1] / "pillow.libs").glob("libjpeg-*.so.62*"))
    return str(bundled[0] if bundled else "libjpeg.so.62")

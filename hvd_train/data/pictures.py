"""Image files, decoded only as far as the part that is asked for."""

from __future__ import annotations

import ctypes
import math
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
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from hvd_train.settings.data import DataConfig

_DAMAGED = (ValueError, TypeError, SyntaxError, EOFError, LookupError, ArithmeticError, struct.error)
UNREADABLE = (OSError, *_DAMAGED)
"""The errors that are raised for a file that is damaged, too large or not an image of a format that is meant."""
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # those of the endings that a data folder may hold
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_APP1, _START_OF_SCAN = 0xE1, 0xDA
_ORIENTATION, _UPRIGHT = 0x0112, 1
_BITS_PER_SAMPLE = 258  # a tag of TIFF
_THIN = 16  # times as long as wide: resized as a whole, it would take many times the memory of its middle


class Picture:
    """The content of an image file, seen as red, green and blue pixels.

    Parts of JPEG files are decoded by the same library that Pillow uses (`jpeg_region.c`), with the same result to the
    bit. Pillow itself decodes other formats, images that are to be turned or have four colours, damaged files, and
    every file if the package was installed without a compiler.
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
        pixels = None if self._whole is not None else _jpeg_part(self._data, left, top, width, height)
        if pixels is None:
            pixels = self._decode()[top : top + height, left : left + width]
        return pixels.permute(2, 0, 1)

    @property
    def is_thin(self) -> bool:
        """Whether most of the image is left out by a crop of its middle."""
        return max(self.width, self.height) > _THIN * min(self.width, self.height)

    def middle(self, resize: int, crop: int) -> Tensor:
        """Return the middle as uint8 [3, crop, crop] of the image with its shorter side resized to `resize` pixels.

        But for rounding it is what torchvision's Resize and CenterCrop give; only what is shown is resized. `crop` is
        at most `resize`. Raises UNREADABLE.
        """
        shorter = min(self.width, self.height)
        left, right, *x = _middle_span(self.width, int(resize * self.width / shorter), crop)
        top, bottom, *y = _middle_span(self.height, int(resize * self.height / shorter), crop)
        part = Image.fromarray(self.part(left, top, right - left, bottom - top).permute(1, 2, 0).numpy())
        shown = part.resize((crop, crop), Image.Resampling.BILINEAR, box=(x[0], y[0], x[1], y[1]))
        return torch.from_numpy(np.array(shown)).permute(2, 0, 1)

    def _decode(self) -> Tensor:
        if self._whole is None:
            self._whole = _decode(self._data, self._max_pixels)
        return self._whole


def _middle_span(side: int, resized: int, crop: int) -> tuple[int, int, float, float]:
    """Return the pixels [start, stop) that the middle `crop` of `resized` depend on, and in these where it lies."""
    scale = side / resized
    first = round((resized - crop) / 2) * scale
    reach = max(1.0, scale)  # of bilinear interpolation
    start, stop = max(0, int(first - reach)), min(side, math.ceil(first + crop * scale + reach))
    return start, stop, first - start, min(first + crop * scale - start, stop - start)


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image with Pillow, whose own limit is `max_pixels` meanwhile. Raises UNREADABLE.

    Pillow warns from its limit on and refuses, before the memory of a canvas is taken, from twice its limit on.
    """
    usual, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels / 2  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning names no file, and each image with odd Exif data gives some
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
        if image.mode[0] in "IF":  # Pillow would cut the values off at 255
            image = Image.fromarray((np.asarray(image) >> (_bits(image) - 8)).astype(np.uint8))
        return torch.from_numpy(np.array(image if image.mode == "RGB" else image.convert("RGB")))


def _bits(image: Image.Image) -> int:
    """Return of how many bits the grey values of an image are, 9 to 16.

    Raises ValueError, which names the mode, if they are signed, have more bits or are floating point numbers.
    """
    if image.mode.startswith("I;16"):
        return int(getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))[0])
    if image.mode == "I" and image.format == "PPM":  # which Pillow scales to 16 bits
        return 16
    raise ValueError(f"it is of mode {image.mode}, whose values have no known range (grey values of 8 or 16 bits do)")


def _jpeg_size(data: bytes, max_pixels: int) -> tuple[int, int] | None:
    """Return width and height of a complete, upright JPEG file, or None where Pillow must look at the file.

    Raises UNREADABLE where there are too many pixels as libjpeg itself reads the header, whoever decodes them.
    """
    library, size = region_library(), (ctypes.c_int * 2)()
    if library is None or not data.startswith(_JPEG_START) or library.region_size(data, len(data), size):
        return None
    width, height = size
    if width * height > max_pixels:
        raise _too_many(max_pixels)
    # A file that was cut off has no end marker. Its first rows alone could be decoded without a sign of that.
    return (width, height) if data.endswith(_JPEG_END) and _is_upright(data, max_pixels) else None


def _is_upright(data: bytes, max_pixels: int) -> bool:
    """Return False where an Exif segment says that the image is to be turned, or may say so."""
    at = len(_JPEG_START)
    while (marker := data[at : at + 2]) != bytes([0xFF, _START_OF_SCAN]):
        if marker[:1] != b"\xff":
            return False  # not where a segment begins: Pillow shall decide
        if marker[1] == _APP1 and data.startswith(b"Exif\0\0", at + 4):
            with _opened(data, max_pixels) as image:
                return bool(image.getexif().get(_ORIENTATION, _UPRIGHT) == _UPRIGHT)
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return True


def _jpeg_part(data: bytes, left: int, top: int, width: int, height: int) -> Tensor | None:
    """Return the pixels [height, width, 3] of a part, or None where Pillow must decode the file."""
    library = region_library()
    assert library is not None
    pixels = torch.empty((height, width, 3), dtype=torch.uint8)
    has_failed = library.region_decode(data, len(data), left, top, width, height, pixels.data_ptr())
    return None if has_failed else pixels


@cache
def region_library() -> ctypes.CDLL | None:
    """Return the decoder of parts, or None where it was not compiled or Pillow has brought no libjpeg-turbo for it."""
    compiled = Path(__file__).with_name("jpeg_region" + str(sysconfig.get_config_var("EXT_SUFFIX")))
    if not compiled.is_file():
        return None
    library = ctypes.CDLL(str(compiled))
    number, size, pointer = ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
    library.region_library.argtypes = [ctypes.c_char_p]
    library.region_size.argtypes = [ctypes.c_char_p, size, pointer]
    library.region_decode.argtypes = [ctypes.c_char_p, size, number, number, number, number, pointer]
    return library if library.region_library(library_path().encode()) else None


def library_path() -> str:
    """Return the path or name of libjpeg-turbo.

    Wheels of Pillow bring it in a folder of their own; a Pillow built on the machine uses the machine's.
    """
    bundled = sorted((Path(PIL.__file__).parents[1] / "pillow.libs").glob("libjpeg-*.so.62*"))
    return str(bundled[0] if bundled else "libjpeg.so.62")

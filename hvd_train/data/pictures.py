"""Decode image files to RGB pixels: sound JPEG files with simplejpeg, everything else with Pillow."""

import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from hvd_train.settings.data import DataConfig

_DAMAGED = (ValueError, TypeError, SyntaxError, EOFError, LookupError, ArithmeticError, struct.error)
UNREADABLE = (OSError, *_DAMAGED)  # the file is damaged, has too many pixels or is no image in a supported format
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # torchvision's IMG_EXTENSIONS
_ORIENTATION, _UPRIGHT = 0x0112, 1  # a tag of Exif
_BITS_PER_SAMPLE = 258  # a tag of TIFF


def decode(data: bytes, max_pixels: int = DataConfig.max_image_pixels) -> Tensor:
    """Return the pixels of an image file, upright, as uint8 [3, height, width].

    Raises UNREADABLE if the file cannot be decoded or, before allocating them, has more than `max_pixels` pixels.
    """
    with _opened(data, max_pixels) as image:
        pixels = None
        if image.format == "JPEG" and image.mode == "RGB" and image.getexif().get(_ORIENTATION, _UPRIGHT) == _UPRIGHT:
            pixels = _decode_jpeg(data, max_pixels)  # in two thirds of Pillow's time
        return torch.from_numpy(_decode_by_pillow(image) if pixels is None else pixels).permute(2, 0, 1)


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image with Pillow, and limit it to `max_pixels` meanwhile. Raises UNREADABLE."""
    # Pillow warns above its own limit, and refuses images above twice that limit.
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


def _decode_jpeg(data: bytes, max_pixels: int) -> np.ndarray | None:
    """Return pixels [height, width, 3], or None if simplejpeg refuses the file. Raises ValueError."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        if int(height) * int(width) <= max_pixels:
            pixels: np.ndarray = simplejpeg.decode_jpeg(data)
            return pixels
    except ValueError:
        return None
    raise _too_many(max_pixels)  # libjpeg and Pillow do not agree about the header


def _decode_by_pillow(image: Image.Image) -> np.ndarray:
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode[0] in "IF":  # Pillow would cut the values off at 255
        image = Image.fromarray((np.asarray(image) >> (_bits(image) - 8)).astype(np.uint8))
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _bits(image: Image.Image) -> int:
    if image.mode.startswith("I;16"):  # unsigned, 9 to 16 bits
        return int(getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))[0])
    if image.mode == "I" and image.format == "PPM":  # which Pillow scales to 16 bits
        return 16
    raise ValueError(f"it is of mode {image.mode}, whose values have no known range (grey values of 8 or 16 bits do)")

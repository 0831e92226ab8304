"""Small image files whose headers claim many pixels."""

import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import psutil
from PIL import Image

from tests.support.jpegs import encoded


def _jpeg(side: int) -> bytes:
    data = encoded(Image.new("RGB", (2, 2)), progressive=True, subsampling=0, optimize=True)
    return data.replace(struct.pack(">HHB", 2, 2, 3), struct.pack(">HHB", side, side, 3), 1)  # of the frame header


def _png(side: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = encoded(Image.new("RGB", (2, 2)), "png")
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def _webp(side: int) -> bytes:
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "webp", save_all=True, append_images=frames[1:])
    return data[:24] + struct.pack("<I", side - 1)[:3] * 2 + data[30:]  # the canvas, on which the frames lie


def _tiff(side: int) -> bytes:
    data = encoded(Image.new("RGB", (2, 2)), "tiff", compression="tiff_deflate")
    for tag in (256, 257, 278):  # width, height, rows in a strip
        at = data.index(struct.pack("<HHI", tag, 3, 1))
        data = data[:at] + struct.pack("<HHII", tag, 4, 1, side) + data[at + 12 :]
    return data


def _bmp(side: int) -> bytes:
    data = encoded(Image.new("RGB", (2, 2)), "bmp")
    return data[:18] + struct.pack("<ii", side, side) + data[26:]


def _ppm(side: int) -> bytes:
    return f"P6 {side} {side} 255\n".encode() + bytes(12)


# For each format a function of the side in pixels that returns the content of a file of less than a kilobyte.
BOMBS = {"jpeg": _jpeg, "png": _png, "webp": _webp, "tiff": _tiff, "bmp": _bmp, "ppm": _ppm}


def peak_growth(action: Callable[[], object]) -> int:
    """Return the most bytes by which an action makes this process grow."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what the process has now
    before = psutil.Process().memory_info().rss
    action()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024 - before

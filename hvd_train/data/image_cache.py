"""Reduced images in files, so that each image is decoded once, whichever process, rank or job needs it again.

The kernel keeps one copy of a file for all processes of a host, in memory that is free otherwise. A file has its name
only when it is whole, so that a reader sees all of an image or nothing. Nothing is forced to disk: a sum of the pixels
tells what a power failure has left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import PIL
import torch
from PIL import features

from hvd_train import plain_file
from hvd_train.console import say
from hvd_train.data.cache_folder import CacheFolder
from hvd_train.data.dataset import Mark
from hvd_train.data.pictures import UNREADABLE, Picture, Pixels, region_library

_HEADER = struct.Struct("<8sII4Q")
"""The kind of file, height and width in pixels, what tells the image file from others, and the sum of the pixels."""
_KIND = b"hvdimg02"
_MOST_BYTES = 2**24  # of an image; a larger one, thousands of pixels long, is decoded each time
_STALE_S = 3600.0  # a file is written in a moment: what is unfinished after so long, a killed process has left
_BLOCK = 4096  # bytes in which a file system gives room to files, as a rule
_SAMPLE = 16  # files by which the room for all of them is estimated
_STAYS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)  # what the next image would meet, too


class ImageCache:
    """The reduced images of a data folder: the shorter side has `side` pixels, or fewer where the image has fewer.

    What it returns is the same whether it was there or not: an image is never seen but by way of its reduced form.
    """

    def __init__(self, place: CacheFolder, root: Path, side: int, max_pixels: int) -> None:
        """Keep images of the folder `root` below `place`. Raises UsageError where that cannot be written."""
        self._place, self._root, self._side, self._max_pixels = place, root, side, max_pixels
        decides = (_KIND, side, os.path.abspath(root), *_makers_of_pixels())
        self._folder = place.path / blake2b(repr(decides).encode(), digest_size=8).hexdigest()
        self._takes_more = True
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise place.refused(error) from None

    def pixels(self, path: Path, mark: Mark) -> Pixels:
        """Return the reduced image of a file, and call `mark` after "read", and after "reduce" where that is needed.

        Raises UNREADABLE where there is no such file, or where it must be decoded and cannot be.
        """
        source, entry = _identity(path.stat()), self._entry(path)  # before it is read: it may be changed at any time
        kept = _read(entry, source)
        if kept is not None:
            mark("read")
            return kept
        data = plain_file.read_bytes(path)
        mark("read")
        made = Picture(data, self._max_pixels).reduced(self._side)
        self._keep(entry, source, made)
        mark("reduce")
        return made

    def missing(self, num_files: int, path: Callable[[int], Path]) -> tuple[int, int]:
        """Return about how many bytes so many images take, and in how many files; 0 where some are kept already.

        A job that is resumed goes on with what there is, whatever has become of the disk.
        """
        sizes = []
        for number in range(0, num_files, -(-num_files // _SAMPLE)):
            if self._entry(path(number)).exists():
                return 0, 0
            with suppress(*UNREADABLE):  # it is named when its turn comes
                picture = Picture(plain_file.read_bytes(path(number)), self._max_pixels)
                shrunk = min(1.0, self._side / min(picture.width, picture.height))
                size = _HEADER.size + 3 * int(picture.width * shrunk) * int(picture.height * shrunk)
                sizes.append(-(-size // _BLOCK) * _BLOCK)
        return num_files * sum(sizes) // max(1, len(sizes)), num_files

    def _entry(self, path: Path) -> Path:
        name = blake2b(os.fsencode(os.path.abspath(path)), digest_size=16).hexdigest()
        return self._folder / name[:2] / name[2:]

    def _keep(self, entry: Path, source: tuple[int, ...], image: Pixels) -> None:
        """Write the file of an image, if that is possible."""
        pixels = image.pixels.numpy().reshape(-1)
        if not self._takes_more or len(pixels) > _MOST_BYTES:
            return
        try:
            self._make_folder_of(entry)
            self._place.check_takes(_HEADER.size + len(pixels))
            header = _HEADER.pack(_KIND, image.height, image.width, *source, _sum(pixels))
            _write(entry, header + pixels.tobytes())
        except OSError as error:
            if error.errno in _STAYS:
                self._takes_more = False
                self._tell(
                    f"{self._place.flag}: no more images of {self._root} are kept in {self._place.path} "
                    f"({error.strerror}); the others are decoded each time"
                )

    def _make_folder_of(self, entry: Path) -> None:
        try:
            entry.parent.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:  # somebody has removed it all: whoever makes it anew may be somebody else
            self._place.make()
            entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _tell(self, message: str) -> None:
        """Print a line unless a living process has done so for this folder: who has, keeps a lock until it ends."""
        with suppress(OSError):
            lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return
            except OSError:  # the file system has no locks: every process says it, once
                os.close(lock)
        with suppress(OSError):  # nobody reads it
            say(message)


def _makers_of_pixels() -> tuple[object, ...]:
    """Return what makes pixels of files, in its versions: another one may make others."""
    decoders = (features.version(name) for name in ("jpg", "libjpeg_turbo", "libtiff", "webp"))
    return torch.__version__, PIL.__version__, *decoders, region_library() is not None


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Return what tells an image file from others of its name, as three numbers of 64 bits.

    Size and time of change are not enough: files of some formats are all of one size, and `cp -p` sets the time.
    """
    return tuple(number % 2**64 for number in (status.st_size, status.st_mtime_ns, status.st_ctime_ns))


def _sum(pixels: npt.NDArray[np.uint8]) -> int:
    """Return the sum of the bytes, seen as numbers of 64 bits as far as they are enough for whole ones."""
    whole = len(pixels) // 8 * 8
    return (int(pixels[:whole].view(np.uint64).sum()) + int(pixels[whole:].sum())) % 2**64


def _read(entry: Path, source: tuple[int, ...]) -> Pixels | None:
    """Return the image that is kept of this very file; None where there is none, or where it is not what was kept."""
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not is_own or status.st_size > _HEADER.size + _MOST_BYTES:
                return None
            content = bytearray(status.st_size)
            os.readv(descriptor, [content])
        finally:
            os.close(descriptor)
        kind, height, width, *made_of, total = _HEADER.unpack_from(content)
        pixels = np.frombuffer(content, np.uint8, offset=_HEADER.size)
        if kind != _KIND or (*made_of,) != source or len(pixels) != 3 * height * width or total != _sum(pixels):
            return None
        return Pixels(torch.from_numpy(pixels.reshape(height, width, 3)))
    except (OSError, ValueError, struct.error):
        return None


def _write(entry: Path, content: bytes) -> None:
    """Make a file, with its name when it is whole. Raises OSError, also where another process is about to make it."""
    partial = entry.with_suffix(".partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        if time.time() - partial.lstat().st_mtime > _STALE_S:
            partial.unlink()  # the image is kept the next time
        raise
    try:
        try:
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
        os.replace(partial, entry)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise

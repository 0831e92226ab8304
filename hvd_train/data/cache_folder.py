"""Where reduced images are kept: a folder of this user alone, on a file system that others need room on, too."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig
from hvd_train.world import control_groups

_MEMORY = Path("/dev/shm")  # noqa: S108  # a folder that only this user can write into is made there
_LEFT_SHARE = 20  # one in so many bytes and files of the file system is left to others, but of bytes ...
_LEFT_LEAST, _LEFT_MOST = 10**9, 10**11  # ... so many: whoever maps a file of a full /dev/shm is killed


@dataclass(frozen=True)
class CacheFolder:
    """The folder of a cache, on a disk or in memory. It may be removed at any time."""

    path: Path
    in_memory: bool

    @classmethod
    def of(cls, config: DataConfig, root: Path) -> CacheFolder | None:
        """Make and return the folder that the config asks for; None where it asks for none.

        Raises UsageError where it cannot be made, where others could write into it, and where it is in the data folder
        `root`.
        """
        if config.cache == "none":
            return None
        folder = cls(_place(config) / f"hvd_train-images-{os.geteuid()}", config.cache == "memory")
        try:
            if folder.path.resolve().is_relative_to(root.resolve()):
                raise OSError(errno.EINVAL, "it is in the folder of the data")
            folder.make()
        except OSError as error:
            raise folder.refused(error) from None
        return folder

    @property
    def flag(self) -> str:
        """What the user has typed to have it."""
        return "--cache memory" if self.in_memory else "--cache disk"

    def make(self) -> None:
        """Make it where it is missing. Raises OSError where it cannot be made, or another user may write into it."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.path.lstat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:  # a link counts as one that all may write into
            raise PermissionError(
                errno.EACCES,
                "it is a link or another user may write into it, and so decide what is trained on: remove it",
            )

    def refused(self, error: OSError) -> UsageError:
        """Return the error of a folder that cannot be used."""
        return UsageError(f"{self.flag}: cannot use {self.path}: {error.strerror}; or name another --cache-dir")

    def room(self) -> tuple[int, int]:
        """Return how many bytes and files it can take besides what is left to others. Raises OSError."""
        disk = os.statvfs(self.path)
        room = disk.f_bavail * disk.f_frsize
        if self.in_memory:
            limit = control_groups.memory_left()
            room = min(room, psutil.virtual_memory().available, room if limit is None else limit)
        left = min(max(disk.f_blocks * disk.f_frsize // _LEFT_SHARE, _LEFT_LEAST), _LEFT_MOST)
        files = disk.f_favail - disk.f_files // _LEFT_SHARE if disk.f_files else sys.maxsize  # 0: made as needed
        return max(0, room - left), max(0, files)

    def check_takes(self, num_bytes: int) -> None:
        """Raise OSError where it has no room for another file of so many bytes."""
        room, files = self.room()
        if num_bytes >= room or not files:
            raise OSError(errno.ENOSPC, "what is free there is left to others")

    def plan(self, num_bytes: int, num_files: int) -> tuple[str, str | None]:
        """Return a line about what is about to be kept here, and one that says why that cannot be, or None.

        Raises UsageError where the file system does not answer.
        """
        try:
            room, files = self.room()
        except OSError as error:
            raise self.refused(error) from None
        note = f"{self.flag} is to keep about {num_bytes / 1e9:,.2f} GB in {num_files:,} files in {self.path}"
        if num_bytes < room and num_files < files:
            return note, None
        return note, (
            f"{self.flag}: the reduced images need about {num_bytes / 1e9:,.2f} GB in {num_files:,} files, and "
            f"{self.path} has room for {room / 1e9:,.2f} GB and {files:,} files besides what is left to others: name "
            "another --cache-dir, or leave --cache out"
        )


def _place(config: DataConfig) -> Path:
    """Return the folder in which that of the cache is. Raises UsageError where there is none."""
    if config.cache_dir is not None:
        return config.cache_dir
    if config.cache == "memory":
        return _MEMORY
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise UsageError("--cache disk: this user has no home folder for it; name a --cache-dir") from None

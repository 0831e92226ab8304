"""The cache of wheels, which stays from one build to the next."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from horovod_build.errors import BuildError
from horovod_build.show import say


def cache_folder() -> Path:
    """Return the folder of wheels, sources and logs, made with mode 0700 if it is missing.

    Raises BuildError if another user could have put files there: a wheel runs as the user who installs it.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home.mkdir(parents=True, exist_ok=True)
    folder = home / "hvd_train"
    if not os.path.lexists(folder):
        folder.mkdir(mode=0o700)
    outer, status = home.stat().st_mode, os.lstat(folder)
    for is_unsafe, problem in (
        (outer & stat.S_IWOTH and not outer & stat.S_ISVTX, f"any user can rename what is in {home}"),
        (stat.S_ISLNK(status.st_mode), f"{folder} is a symlink"),
        (status.st_uid != os.geteuid(), f"{folder} belongs to user {status.st_uid}"),
        (status.st_mode & (stat.S_IWGRP | stat.S_IWOTH), f"other users can write to {folder}"),
    ):
        if is_unsafe:
            raise BuildError(
                f"{problem}, so another user's code could run here as yours: fix or delete it, or name another "
                "folder for the cache: XDG_CACHE_HOME=$HOME/.cache"
            )
    folder.chmod(0o700)
    return folder


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class WheelCache:
    """Keep finished wheels by key. A wheel appears whole or not at all; a damaged one counts as absent."""

    def __init__(self, folder: Path | None = None) -> None:
        """Take the folder of wheels, made if it is missing. Raises BuildError as `cache_folder` does."""
        self.folder = folder or cache_folder() / "wheels"
        self.folder.mkdir(exist_ok=True)

    def wheel(self, key: str) -> Path | None:
        """Return the wheel of a key, or None if it is absent or damaged."""
        entry = self.folder / key
        try:
            record = json.loads((entry / "wheel.json").read_text(encoding="utf-8"))
            wheel = entry / Path(str(record["file"])).name
            return wheel if file_digest(wheel) == record["sha256"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def publish(self, key: str, wheel: Path, inputs: dict[str, Any]) -> Path:
        """Put a wheel into the cache in place of an earlier one, and return its path."""
        entry, part = self.folder / key, self.folder / f"{key}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        shutil.copyfile(wheel, part / wheel.name)
        record = {"file": wheel.name, "sha256": file_digest(part / wheel.name), "inputs": inputs}
        (part / "wheel.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(entry, ignore_errors=True)
        part.rename(entry)
        return entry / wheel.name

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Let one build of a key run at a time; the lock ends with the process."""
        with (self.folder / f"{key}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process is building the same wheel: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

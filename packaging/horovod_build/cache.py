"""The cache of wheels, which stays from one build to the next.

A wheel runs as whoever installs it. So the cache is its user's alone (mode 0700), nothing in it that belongs to
somebody else is used, and links are not followed. A digest in it tells a damaged wheel from a whole one, not a friend's
from a foe's: who can change the one can change the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from horovod_build.errors import BuildError
from horovod_build.show import say

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ANOTHER = "name another folder for the cache: XDG_CACHE_HOME=$HOME/.cache"


def cache_folder() -> Path:
    """Return the folder that keeps wheels, sources and logs, made where it is missing; only this user can open it.

    Raises BuildError where it belongs to somebody else, is a link, or could be replaced by anybody.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    home = Path(base) if base else Path.home() / ".cache"
    home.mkdir(parents=True, exist_ok=True)
    mode = home.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise BuildError(f"{home}: what is in it may be renamed by anybody: `chmod +t` it, or {_ANOTHER}")
    return own_folder(home / "hvd_train")


def own_folder(folder: Path) -> Path:
    """Return a folder of this user, made where it is missing; nobody else can open it any more. Raises BuildError."""
    if not os.path.lexists(folder):
        folder.mkdir(mode=0o700)
    check_owner(folder)
    folder.chmod(0o700)
    return folder


def check_owner(path: Path) -> os.stat_result:
    """Return the status of a file or folder of this user. Raises BuildError where it is another user's, or a link."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise BuildError(f"{path} is a link, which is not followed: remove it, or {_ANOTHER}")
    if status.st_uid != os.geteuid():
        try:
            name = f"{pwd.getpwuid(status.st_uid).pw_name} ({status.st_uid})"
        except KeyError:
            name = f"user {status.st_uid}"
        raise BuildError(f"{path} belongs to {name}, whose code would run here as yours: remove it, or {_ANOTHER}")
    return status


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class WheelCache:
    """Keeps finished wheels by key. A wheel appears whole or not at all, and a damaged one counts as absent."""

    def __init__(self, folder: Path | None = None) -> None:
        """Take the folder of wheels, made where it is missing. Raises BuildError where it is not this user's alone."""
        self.folder = own_folder(folder or cache_folder() / "wheels")

    def wheel(self, key: str) -> Path | None:
        """Return the wheel of a key, or None where it is absent or damaged, or others could have changed it.

        Raises BuildError where it belongs to somebody else.
        """
        entry = self.folder / key
        try:
            check_owner(entry)
            if check_owner(entry / "wheel.json").st_mode & _OTHERS_WRITE:
                return None
            record = json.loads((entry / "wheel.json").read_text(encoding="utf-8"))
            wheel = entry / Path(str(record["file"])).name
            if check_owner(wheel).st_mode & _OTHERS_WRITE:
                return None
            return wheel if file_digest(wheel) == record["sha256"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def publish(self, key: str, wheel: Path, inputs: dict[str, Any]) -> Path:
        """Put a wheel into the cache, replacing the one that is there, and return its path."""
        entry, part = self.folder / key, self.folder / f"{key}.part"
        shutil.rmtree(part, ignore_errors=True)
        own_folder(part)
        shutil.copyfile(wheel, part / wheel.name)
        record = {"file": wheel.name, "sha256": file_digest(part / wheel.name), "inputs": inputs}
        (part / "wheel.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for file in part.iterdir():
            file.chmod(0o600)
        shutil.rmtree(entry, ignore_errors=True)
        part.rename(entry)
        return entry / wheel.name

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Let one build of a key run at a time; the lock ends with the process, however it ends."""
        with (self.folder / f"{key}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process is building the same wheel: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

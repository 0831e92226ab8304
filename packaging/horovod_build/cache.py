"""The folders of the builder: the cache of wheels, and room for temporary files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from horovod_build.machine import BuildError

NEEDED_DISK_MB = 1200


def say(line: str) -> None:
    """Print a line at once, with the prefix of this program."""
    print(f"horovod: {line}", flush=True)


def cache_folder() -> Path:
    """Return the folder of wheels, sources and logs, made with mode 0700 if it is missing.

    Raises BuildError if another user could have put files there: a wheel runs as the user who
    installs it.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home.mkdir(parents=True, exist_ok=True)
    folder = home / "hvd_train"
    if not os.path.lexists(folder):
        folder.mkdir(mode=0o700)
    outer, status = home.stat().st_mode, os.lstat(folder)
    for is_unsafe, problem in (
        (
            outer & stat.S_IWOTH and not outer & stat.S_ISVTX,
            f"any user can rename what is in {home}",
        ),
        (stat.S_ISLNK(status.st_mode), f"{folder} is a symlink"),
        (status.st_uid != os.geteuid(), f"{folder} belongs to user {status.st_uid}"),
        (status.st_mode & (stat.S_IWGRP | stat.S_IWOTH), f"other users can write to {folder}"),
    ):
        if is_unsafe:
            raise BuildError(
                f"{problem}, so another user's code could run here as yours: fix or delete it, or "
                "name another folder for the cache: XDG_CACHE_HOME=$HOME/.cache"
            )
    folder.chmod(0o700)
    return folder


def build_folder() -> Path:
    """Return the folder for temporary files.

    Raises BuildError if it is small, or has a blank, where make splits.
    """
    folder = Path(tempfile.gettempdir())
    free_mb = shutil.disk_usage(folder).free // 2**20
    if free_mb < NEEDED_DISK_MB or " " in str(folder):
        raise BuildError(
            f"{folder} cannot hold temporary files: {NEEDED_DISK_MB} MB are needed and "
            f"{free_mb} MB free, and its path must have no blank; set TMPDIR to another "
            "folder, such as /var/tmp"
        )
    return folder


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wheels_folder() -> Path:
    """Return the folder of finished wheels, one folder for each key.

    Raises BuildError as `cache_folder` does.
    """
    folder = cache_folder() / "wheels"
    folder.mkdir(exist_ok=True)
    return folder


def cached_wheel(key: str) -> Path | None:
    """Return the wheel of a key, or None if it is absent or damaged."""
    entry = wheels_folder() / key
    try:
        record = json.loads((entry / "wheel.json").read_text(encoding="utf-8"))
        wheel = entry / Path(str(record["file"])).name
        return wheel if file_digest(wheel) == record["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def publish(key: str, wheel: Path, inputs: dict[str, Any]) -> Path:
    """Put a wheel into the cache in place of an earlier one, and return its path."""
    entry = wheels_folder() / key
    entry.mkdir(exist_ok=True)
    part = Path(shutil.copyfile(wheel, entry / f"{os.getpid()}.part"))  # others may build the same
    record = {"file": wheel.name, "sha256": file_digest(part), "inputs": inputs}
    part.replace(entry / wheel.name)
    (entry / "wheel.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return entry / wheel.name

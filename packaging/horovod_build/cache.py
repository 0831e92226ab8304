"""The cache of wheels, which stays from one build to the next."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from horovod_build.show import say


def cache_folder() -> Path:
    """Return the folder that keeps wheels, sources and logs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hvd_train"


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class WheelCache:
    """Keeps finished wheels by key. A wheel appears whole or not at all, and a damaged one counts as absent."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder() / "wheels"

    def wheel(self, key: str) -> Path | None:
        """Return the wheel of a key, or None where it is absent or damaged."""
        entry = self.folder / key
        try:
            record = json.loads((entry / "wheel.json").read_text(encoding="utf-8"))
            wheel = entry / str(record["file"])
            return wheel if file_digest(wheel) == record["sha256"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def publish(self, key: str, wheel: Path, inputs: dict[str, Any]) -> Path:
        """Put a wheel into the cache, replacing the one that is there, and return its path."""
        entry, part = self.folder / key, self.folder / f"{key}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        shutil.copyfile(wheel, part / wheel.name)
        record = {"file": wheel.name, "sha256": file_digest(part / wheel.name), "inputs": inputs}
        (part / "wheel.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(entry, ignore_errors=True)
        part.rename(entry)
        return entry / wheel.name

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Let one build of a key run at a time; the lock ends with the process, however it ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{key}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process is building the same wheel: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

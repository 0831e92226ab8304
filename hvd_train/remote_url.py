"""Run folders that are named by a URL, as s3://bucket/run: how one is told from a path, and where it is worked on here.

A URL travels as a Path, as other folders do, with one slash in the place of two: `s3:/bucket/run`.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from hvd_train.errors import UsageError

FOLDER = "HVD_TRAIN_REMOTE_DIR"
_URL = re.compile(r"([a-z][a-z0-9+.:-]+):(?:/+(.*))?", re.DOTALL)
_ROOTED = ("file", "local")


def url_of(path: str | Path) -> str | None:
    """Return the URL that a text or path is; None where it is a path of this machine."""
    match = _URL.fullmatch(str(path))
    if match is None:
        return None
    return f"{match[1]}://{'/' if match[1] in _ROOTED else ''}{(match[2] or '').rstrip('/')}"


def as_typed(path: Path) -> str:
    """Return a path, or the URL that it is, as people write it."""
    return url_of(path) or str(path)


def name_of(url: str) -> str:
    """Return the last part of a URL, as the name of a file."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", url.rpartition("/")[2]).lstrip(".") or "run"


def working_folder(path: Path) -> Path:
    """Return the folder of this machine in which a run is worked on: the path itself, or one that belongs to its URL.

    Raises UsageError where there is no place for that.
    """
    url = url_of(path)
    if url is None:
        return path
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    return _root() / f"{name_of(url)}-{digest}"


def _root() -> Path:
    if named := os.environ.get(FOLDER):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hvd_train", "remote")
    except RuntimeError:
        raise UsageError(f"this user has no home folder to work on a remote run in: set {FOLDER}=FOLDER") from None


def check(url: str, flag: str = "--output-dir") -> None:
    """Raise UsageError where a URL holds a password, or is of a kind that a run folder cannot be at."""
    scheme, _, rest = url.partition("://")
    authority = rest.partition("/")[0]
    if "@" in authority and ":" in authority.rpartition("@")[0]:
        raise UsageError(
            f"{flag} {scheme}://...@{authority.rpartition('@')[2]}/...: it holds a password, which would be kept in "
            "config.yaml; leave it out, and give it where the library of that service looks for it"
        )
    if "?" in rest or "::" in url:
        raise UsageError(f"{flag}: a run folder's URL has no `?` and no `::`, but is as in s3://bucket/runs/first")
    if not rest.strip("/"):
        raise UsageError(f"{flag} {url}: it names no folder; write it as in s3://bucket/runs/first")

"""Copy a run folder to s3://, gs:// or another file system of fsspec, and back (`--copy-to`)."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hvd_train import plain_file
from hvd_train.errors import UsageError
from hvd_train.run_files.run_folder import CONFIG, RunFolder

_CHECKPOINTS, _FETCHED = "checkpoints", ".fetched"


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path there. Raises UsageError if its library is not installed."""
    import fsspec  # slow to import

    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise UsageError(f"--copy-to {url}: {error}") from None
    return found


def fetch(url: str, folder: Path, report: Callable[[str], None]) -> None:
    """Copy the run at `url`, if any, to a folder without one. Raises UsageError if that fails."""
    if (folder / CONFIG).exists():
        return
    system, root = file_system(url)
    new = folder.with_name(folder.name + _FETCHED)
    try:
        if not system.exists(f"{root}/{CONFIG}"):
            return
        report(f"fetching the run in {url}")
        shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
        new.mkdir(parents=True)  # fails for a planted link
        for path in system.find(root):
            local = new / path.removeprefix(root).lstrip("/")
            if ".." in local.parts:
                raise ValueError(f"{path} would be outside of the folder")
            local.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(path, str(local))
        new.rename(folder)  # in place of an empty one
    except Exception as error:  # noqa: BLE001  # a file system may raise anything
        raise UsageError(f"--copy-to {url}: cannot fetch the run ({type(error).__name__}: {error})") from None


class Copies:
    """Copies what has changed in a run folder, in a thread of its own. What fails is reported, and tried again."""

    def __init__(self, url: str, claimed: RunFolder, report: Callable[[str], None]) -> None:
        self._url, self._claimed, self._folder, self._report = url, claimed, claimed.path, report
        self._system, self._root = file_system(url)
        self._copied: dict[str, tuple[int, int]] = {}  # size and time of change
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copies")
        self._last: Future[None] | None = None

    def start(self) -> None:
        """Begin to copy, unless a copy is under way."""
        if self._last is None or self._last.done():
            self._last = self._thread.submit(self._copy)

    def close(self) -> None:
        """Copy what is left."""
        self._thread.submit(self._copy)
        self._thread.shutdown(wait=True)

    def _put(self, path: Path, name: str) -> None:
        try:
            with plain_file.opened(path, follows=False) as file:
                status = os.fstat(file.fileno())
                now = status.st_size, status.st_mtime_ns
                if self._copied.get(name) != now:
                    self._system.put_file(f"/proc/self/fd/{file.fileno()}", f"{self._root}/{name}")
                    self._copied[name] = now
        except FileNotFoundError:
            if path.exists():  # else it was an old checkpoint
                raise

    def _copy(self) -> None:
        if not self._claimed.held():  # another process writes the folder now, and copies it
            return
        try:
            # Checkpoints come last: a run that is fetched forgets records after its checkpoint, but cannot lack them.
            for path in sorted(self._folder.rglob("*"), key=lambda path: (path.parent.name == _CHECKPOINTS, path)):
                name = str(path.relative_to(self._folder))
                is_own = path.is_file() and not path.is_symlink()  # wandb, too, makes symlinks
                if is_own and not path.name.startswith(".") and path.suffix != ".partial":
                    self._put(path, name)
            self._system.invalidate_cache()
            there = self._system.find(f"{self._root}/{_CHECKPOINTS}")
            for path in there if len(there) > 1 else ():
                if not (self._folder / _CHECKPOINTS / path.rpartition("/")[2]).exists():
                    self._system.rm_file(path)
        except Exception as error:  # noqa: BLE001  # a file system may raise anything
            self._report(f"--copy-to {self._url}: {type(error).__name__}: {error}; the next commit tries again")

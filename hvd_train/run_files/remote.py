"""Copy a run folder to s3://, gs:// or another file system of fsspec, and back (`--copy-to`).

A URL has one owner, the run folder that is copied there. A small object at the URL names it, and
changes as long as its job lives.
"""

import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hvd_train import plain_file
from hvd_train.errors import UsageError
from hvd_train.run_files.run_folder import CONFIG, RunFolder

# at the URL; in the run folder it has the name by which the folder owns the URL
OWNER = ".owner.json"
BEAT_S = 10.0  # from one change of it to the next
PATIENCE_S = 30.0  # without a change the job is gone
_CHECKPOINTS = "checkpoints"
_LOCAL = (".partial", ".distrusted")  # suffixes of files that are not copied
_FETCHED = ".fetched"
_PROBE = ".probe"


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path there.

    Raises UsageError if its library is not installed.
    """
    import fsspec  # slow to import

    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise UsageError(f"--copy-to {url}: {error}") from None
    if hasattr(found[0], "auto_mkdir"):  # of file://
        found[0].auto_mkdir = True
    return found


class Copies:
    """Copies what has changed in a run folder, in a thread of its own.

    What fails is reported, and tried again.
    """

    def __init__(
        self, url: str, folder: Path, report: Callable[[str], None], *, new: bool = False
    ) -> None:
        """Prepare to copy `folder`, which may not exist; `new` begins another run there.

        Raises UsageError if the URL cannot be written, if a living job has it, or if another folder
        has had it since.
        """
        self._url = url
        self._folder = folder
        self._report = report
        self._system, self._root = file_system(url)
        self._copied: dict[str, tuple[int, int]] = {}  # size and time of change
        self._claimed: RunFolder | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copies")
        self._last: Future[bool] | None = None
        self._is_last = False  # whether no commit follows the copy
        self._is_whole = True  # whether the last copy has succeeded
        self._ends = threading.Event()
        text = "" if new else _text(folder / OWNER)
        self._id = text if re.fullmatch(r"[0-9a-f]{16}", text) else secrets.token_hex(8)
        with self._reaching("write there"):
            owner = self._owner()
            if owner.get("id") == self._id:
                return
            self._system.pipe_file(f"{self._root}/{_PROBE}", b"")
            self._system.rm_file(f"{self._root}/{_PROBE}")
            lives = bool(owner) and self._lives(owner)
        if lives:
            raise UsageError(f"--copy-to {url}: {_named(owner)} copies there: name another URL")
        if owner and not new and (folder / CONFIG).exists() and text != _fetched(owner):
            newer = (
                f"{_named(owner)} has copied there since: remove {folder} to continue from there"
            )
            raise UsageError(f"--copy-to {url}: {newer}, or name another URL")

    def fetch(self) -> None:
        """Copy the run at the URL, if any, to a folder without one.

        Raises UsageError if that fails.
        """
        system = self._system
        root = self._root
        folder = self._folder
        if (folder / CONFIG).exists():
            return
        new = folder.with_name(folder.name + _FETCHED)
        with self._reaching("fetch the run"):
            if not system.exists(f"{root}/{CONFIG}"):
                return
            self._report(f"fetching the run in {self._url}")
            shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
            new.mkdir(parents=True)  # fails for a planted link
            for path in system.find(root):
                local = new / path.removeprefix(root).lstrip("/")
                if ".." in local.parts:
                    raise ValueError(f"{path} would be outside of the folder")
                local.parent.mkdir(parents=True, exist_ok=True)
                if local.name == OWNER:
                    local.write_text(_fetched(self._owner(path)))
                else:
                    system.get_file(path, str(local))
            new.rename(folder)  # in place of an empty one

    def begin(self, claimed: RunFolder) -> None:
        """Take the URL, and let the claimed folder be copied from now on.

        Raises UsageError if that fails.
        """
        with self._reaching("take it"):
            if _text(claimed.path / OWNER) != self._id:
                claimed.write(OWNER, self._id)
            self._say_who()
        self._claimed = claimed
        threading.Thread(target=self._live, name="copies-owner", daemon=True).start()

    def start(self) -> None:
        """Begin to copy, unless a copy is under way."""
        if self._last is None or self._last.done():
            self._last = self._thread.submit(self._copy)

    def finish(self) -> Future[bool]:
        """Copy what is left; the result is whether all of it is there."""
        self._is_last = True
        return self._thread.submit(self._copy)

    def close(self) -> None:
        """Copy what is left, unless that has just failed, and release the URL."""
        if self._is_whole or not self._is_last:
            self.finish()
        self._thread.shutdown(wait=True)
        self._ends.set()
        with suppress(Exception):
            if self._is_owner():
                self._say_who(ended=True)

    @contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # a file system may raise anything
            why = f"cannot {what} ({type(error).__name__}: {error})"
            raise UsageError(f"--copy-to {self._url}: {why}") from None

    def _owner(self, path: str = "") -> dict[str, Any]:
        """Return what the owner of the URL, or of another one with its object at
        `path`, has written; {} without.
        """
        self._system.invalidate_cache()
        try:
            values = json.loads(self._system.cat_file(path or f"{self._root}/{OWNER}"))
        except (FileNotFoundError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}

    def _is_owner(self) -> bool:
        """Return whether this process still has folder and URL."""
        return (
            self._claimed is not None
            and self._claimed.held()
            and self._owner().get("id") == self._id
        )

    def _say_who(self, *, ended: bool = False) -> None:
        now = datetime.now().astimezone().isoformat()  # changes each time
        values = {
            "id": self._id,
            "host": socket.gethostname(),
            "time": now,
            "ended": ended,
        }
        self._system.pipe_file(f"{self._root}/{OWNER}", json.dumps(values).encode())

    def _live(self) -> None:
        while not self._ends.wait(BEAT_S):
            with suppress(Exception):  # the next copy reports it
                if self._is_owner():
                    self._say_who()

    def _lives(self, owner: dict[str, Any]) -> bool:
        """Return whether the job of the URL's owner is alive: whether
        what it has written changes.
        """
        if owner.get("ended"):
            return False
        self._report(
            f"--copy-to {self._url}: waiting {PATIENCE_S:.0f} s at most for "
            f"signs of {_named(owner)}"
        )
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(BEAT_S / 10)
            now = self._owner()
            if now != owner:
                return not now.get("ended", True)
        return False

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

    def _copy(self) -> bool:
        claimed = self._claimed
        # another process writes the folder now, and copies it
        if claimed is None or not claimed.held():
            return True
        folder = claimed.path
        try:
            if not self._is_owner():
                raise UsageError(
                    f"{_named(self._owner())} has the URL now: this one copies nothing more"
                )
            # Checkpoints come last: a run that is fetched forgets records after its checkpoint, but
            # cannot lack them.
            for path in sorted(
                folder.rglob("*"), key=lambda path: (path.parent.name == _CHECKPOINTS, path)
            ):
                name = str(path.relative_to(folder))
                is_own = path.is_file() and not path.is_symlink()  # wandb, too, makes symlinks
                if is_own and not path.name.startswith(".") and path.suffix not in _LOCAL:
                    self._put(path, name)
            self._system.invalidate_cache()
            there = self._system.find(f"{self._root}/{_CHECKPOINTS}")
            for path in there if len(there) > 1 else ():
                if not (folder / _CHECKPOINTS / path.rpartition("/")[2]).exists():
                    self._system.rm_file(path)
        except Exception as error:  # noqa: BLE001  # a file system may raise anything
            again = "the same command" if self._is_last else "the next commit"
            why = f"{type(error).__name__}: {error}; {again} tries again"
            self._report(
                f"--copy-to {self._url}: {error if isinstance(error, UsageError) else why}"
            )
            self._is_whole = False
        else:
            self._is_whole = True
        return self._is_whole


def _text(path: Path) -> str:
    try:
        return plain_file.read_text(path, 100)
    except (OSError, ValueError):
        return ""


def _fetched(owner: dict[str, Any]) -> str:
    """Return what the file of a fetched folder says, until the folder owns the URL itself."""
    return f"fetched from {owner.get('id')}"


def _named(owner: dict[str, Any]) -> str:
    return f"a job on {owner.get('host', 'another host')} ({owner.get('time', 'no time')})"

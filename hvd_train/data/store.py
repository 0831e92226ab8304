"""Files of a data set in a folder or at a URL of fsspec, and their copies on this host's disk.

A file gets its name once it is whole. The lock of a file that is being made ends with its process,
so there is nothing to clean up after a kill.
"""

import errno
import fcntl
import itertools
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from hvd_train import plugin
from hvd_train.console import say
from hvd_train.data.identity import digest_of_bytes
from hvd_train.errors import DataTimeout, UsageError, first_line

T = TypeVar("T")
TIMEOUT_S = 600.0  # of a store that fails, before the run ends
CONNECTIONS = 16  # to a store at once
_QUIET_S = 10.0  # before a line says what is waited for
_START_S = 5.0  # before a URL counts as wrong
_LONGEST_PAUSE_S = 30.0  # between two tries
_LOOK_S = 1.0  # between two looks whether a store has answered
_FREE = 0.1  # the share of the disk that stays free if there is no limit
_COPIES = "shards"
_PARTIAL = ".partial"
_WAITING = "waiting.lock"  # is held by the process that says so
_FINAL = (UsageError, ImportError, FileNotFoundError, NotADirectoryError, PermissionError)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# what file systems of fsspec call the version of a file, or the time of its last change
_VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

_checked = dict["File", int]()  # the minute in which a file that is not copied was looked at


def without_secrets(text: str) -> str:
    """Return a text whose URLs have no user, password and query."""
    text = re.sub(r"(\w://)[^/\s'\"]*@", r"\1", text)
    return re.sub(r"(\w://[^\s?'\"]*)\?[^\s'\")]*", r"\1", text)


def bytes_of(size: str | int) -> int:
    """Return the number of bytes in a size such as 500GB. Raises UsageError."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+) ?([KMGT]?)B?", str(size).upper())
    if not found:
        raise UsageError(f"size {size!r}: write it as in 500GB or 1.5TB")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True)
class File:
    """A file in a store, as it was when it was listed."""

    name: str
    path: str  # in the file system
    size: int  # bytes
    version: str = ""  # changes with the content; empty if unknown
    unpacked: int | None = None  # bytes of what zstd makes of it; None if it is not compressed

    @property
    def size_of_copy(self) -> int:
        """How many bytes its copy has."""
        return self.size if self.unpacked is None else self.unpacked


@dataclass(frozen=True)
class Store:
    """A folder or a URL of fsspec, and the folder of this host's copies of its files.

    It holds no connection, so that it can be sent to other processes.
    """

    url: str
    cache: Path
    cache_size: int | None = None  # bytes; None: a tenth of the disk stays free; 0: no copies
    timeout_s: float = TIMEOUT_S  # of a reader that waits for a store that fails

    @property
    def shown(self) -> str:
        """The URL for messages."""
        return without_secrets(self.url)

    @property
    def is_local(self) -> bool:
        """Whether files are read in place."""
        return "://" not in self.url or self.url.startswith("file://")

    @contextmanager
    def reaching(self, what: str) -> Iterator[None]:
        """Raise UsageError, without secrets, for any error of a file system."""
        try:
            yield
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001  # a file system may raise anything
            raise UsageError(f"{self.shown}: cannot {what} ({_reason(error)})") from None

    def system(self) -> tuple[Any, str]:
        """Return fsspec's file system and the path of the URL there. Raises UsageError."""
        import fsspec  # slow to import

        with self.reaching("open it"):
            found: tuple[Any, str] = fsspec.core.url_to_fs(self.url)
        return found

    def path_of(self, name: str) -> str:
        """Return the path of a file in the folder of the URL."""
        return f"{self.system()[1].rstrip('/')}/{name}"

    def content(self, name: str) -> bytes | None:
        """Return a small file; None if there is none. Raises UsageError."""
        path = self.path_of(name)

        def get(system: Any) -> bytes | None:
            with suppress(FileNotFoundError, NotADirectoryError):
                return bytes(system.cat_file(path))
            return None

        return self._at_start(f"read {name}", get)

    def find(self, path: str) -> File | None:
        """Return a file of the file system; None if there is none, or it is forbidden.

        Raises UsageError.
        """

        def look(system: Any) -> File | None:
            # a store that does not list its objects forbids those that are missing
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                return self._file(system.info(path))
            return None

        return self._at_start(f"look for {path}", look)

    def write(self, path: str, content: bytes) -> None:
        """Write a small file of the file system. Raises UsageError."""
        self._at_start(f"write {path}", lambda system: system.pipe_file(path, content))

    def names(self) -> list[str]:
        """Return the names in the folder. Raises UsageError."""
        _, root = self.system()
        found = self._at_start("list it", lambda system: system.ls(root, detail=False))
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def files(self, suffix: str) -> list[File]:
        """Return the files of the folder with this suffix, or those that the URL names, also by *
        and {000..123}, in the order of their paths.

        Raises UsageError.
        """
        _, root = self.system()
        return self._at_start("list it", lambda system: self._list(system, root, suffix))

    def _list(self, system: Any, root: str, suffix: str) -> list[File]:
        if len(paths := _expanded(root)) > 1:
            found = [{"name": path} for path in paths]
        elif root.endswith(suffix):
            found = [*system.glob(root, detail=True).values()]
        else:
            found = system.ls(root, detail=True)
        wanted = [each for each in found if each["name"].endswith(suffix)]
        with ThreadPoolExecutor(CONNECTIONS) as threads:
            # a web server lists names alone
            files = threads.map(
                lambda each: self._file(each if each.get("size") else system.info(each["name"])),
                wanted,
            )
            return sorted(files, key=lambda file: file.path)

    def _file(self, info: dict[str, Any]) -> File:
        path = info["name"]
        name = path.rpartition("/")[2]
        if self.is_local:  # fsspec has the time of a link, not of its target
            status = os.stat(path)
            return File(name, path, status.st_size, str(status.st_mtime))
        if info.get("size") is None:
            raise ValueError(f"the server does not say how long {path} is")
        version = next((str(info[kind]) for kind in _VERSIONS if info.get(kind)), "")
        return File(name, path, int(info["size"]), version)

    def read(self, file: File, start: int, stop: int) -> bytes:
        """Return bytes of a file: in place if it is local, else of the copy on this host.

        Raises UsageError if the file has changed or cannot be fetched, and DataTimeout.
        """
        if not self.copies(file):
            if self.is_local:
                return self._part(Path(file.path), file, start, stop)
            with self._waiting_for(file.name):
                return self.patiently(
                    f"fetch {file.name}",
                    lambda system: self._part_of_store(system, file, start, stop),
                )
        while True:
            with suppress(FileNotFoundError):  # others may remove it to make room
                return self._part(self.copy_of(file), None, start, stop)
            with self._waiting_for(file.name):
                self.copy(file)

    def read_listed(self, file: File, start: int, stop: int) -> bytes:
        """Return bytes of a file in the store that was listed just now. Raises as `read` does."""
        with self._waiting_for(file.name):
            return self.patiently(
                f"read {file.name}",
                lambda system: bytes(system.cat_file(file.path, start=start, end=stop)),
            )

    def _part_of_store(self, system: Any, file: File, start: int, stop: int) -> bytes:
        minute = int(time.monotonic() // 60)
        if _checked.get(file) != minute:  # to ask before each read would double the requests
            now = self._file(system.info(file.path))
            self._check(file, now.size, now.version)
            _checked[file] = minute
        return bytes(system.cat_file(file.path, start=start, end=stop))

    def copies(self, file: File) -> bool:
        """Return whether a file is read from a copy on this host."""
        return file.unpacked is not None or not (self.is_local or self.cache_size == 0)

    def copy(self, file: File) -> None:
        """Copy a file to this host, unless the copy is there, or the file is read in place.

        Raises UsageError or DataTimeout.
        """
        if not self.copies(file):
            return
        # also if another process tries first, for as long
        deadline = time.monotonic() + self.timeout_s
        path = self.copy_of(file)
        self.made(path, lambda unfinished: self._fetch(file, unfinished, deadline))
        with suppress(OSError):  # others may have removed it
            os.utime(path)  # it will be used, and may have been released before

    def release(self, file: File) -> None:
        """Let the copy of a file be the first that makes room for others."""
        with suppress(OSError):
            os.utime(self.copy_of(file), (0, 0))

    def copy_of(self, file: File) -> Path:
        """Return the path of the copy on this host."""
        key = digest_of_bytes(f"{self.url}\n{file.path}\n{file.version}".encode())
        return self.cache / _COPIES / f"{key}.{file.size_of_copy}.{Path(file.name).name[-100:]}"

    def _part(self, path: Path, listed: File | None, start: int, stop: int) -> bytes:
        # A file that is removed meanwhile can be read until it is closed.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if listed is not None:
                self._check(listed, status.st_size, str(status.st_mtime))
            elif status.st_size != _size_of(path):  # power failed
                path.unlink(missing_ok=True)
                raise FileNotFoundError
            else:
                now = time.time_ns()  # the kernel's own clock is coarser
                os.utime(descriptor, ns=(now, now))  # it is in use
            return os.pread(descriptor, stop - start, start)
        finally:
            os.close(descriptor)

    def _check(self, file: File, size: int, version: str) -> None:
        if size != file.size or file.version not in ("", version):
            raise UsageError(
                f"{self.shown}: {file.name} has changed since this run listed it: start again, or "
                "put back what it was"
            )

    def _fetch(self, file: File, path: Path, deadline: float) -> None:
        """Write a whole file to `path`. Raises as `patiently`."""
        self._make_room(path)

        def get(system: Any) -> None:
            # an answer that comes too late must not get into the file of a later request
            with open(path, "ab") as own:
                now = self._file(system.info(file.path))
                self._check(file, now.size, now.version)
                system.get_file(file.path, f"/proc/self/fd/{own.fileno()}")
            if (size := path.stat().st_size) != file.size:
                raise ValueError(f"got {size:,} of {file.size:,} bytes")

        self.patiently(f"fetch {file.name}", get, deadline, growing=path)
        if file.unpacked is not None:
            with self.reaching(f"unpack {file.name}"):
                _unpack(path, file.unpacked)

    @contextmanager
    def _waiting_for(self, what: str) -> Iterator[None]:
        """Print one line if the block takes long, unless another process of the host has."""
        is_over = threading.Event()

        def tell() -> None:
            if is_over.wait(_QUIET_S):
                return
            with suppress(OSError):
                self.cache.mkdir(parents=True, exist_ok=True)
                with open(self.cache / _WAITING, "ab") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    say(
                        f"waiting for {what} of {self.shown} (for {_QUIET_S:.0f} s); after "
                        f"{self.timeout_s:.0f} s (--data-timeout) the job commits and ends"
                    )
                    is_over.wait()

        threading.Thread(target=tell, daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def _at_start(self, what: str, action: Callable[[Any], T]) -> T:
        """Return what `action` does with the file system; the URL may be wrong.

        Raises UsageError.
        """
        try:
            with self._waiting_for("an answer"):
                return self.patiently(what, action, tries_s=_START_S)
        except DataTimeout as error:
            raise UsageError(str(error)) from None

    def patiently(
        self,
        what: str,
        action: Callable[[Any], T],
        deadline: float | None = None,
        *,
        tries_s: float | None = None,
        growing: Path | None = None,
    ) -> T:
        """Return what `action` does with the file system; if it fails, try again for a while.

        `deadline` is on the monotonic clock; by default it is `timeout_s` from now. No try begins
        after it, or after `tries_s` seconds. A try ends then, too, unless the file `growing` has
        grown in the last `timeout_s`. Raises: UsageError: if a repetition would fail; DataTimeout;
        OSError: if the disk is full.
        """
        begin = time.monotonic()
        deadline = deadline or begin + self.timeout_s
        last_try = deadline if tries_s is None else begin + tries_s
        for number in itertools.count():
            system, _ = self.system()
            system.invalidate_cache()
            try:
                return self._answer(partial(action, system), deadline, growing)
            except Exception as error:  # a file system may raise anything
                if getattr(error, "errno", None) in _FULL:
                    raise
                if _is_final(error):
                    with self.reaching(what):
                        raise
                reason = _reason(error)
            pause = min(2.0**number, _LONGEST_PAUSE_S)
            if time.monotonic() + pause > last_try:
                raise DataTimeout(
                    f"{self.shown}: cannot {what} ({reason}); try again when the store answers"
                )
            time.sleep(pause)
        raise AssertionError

    def _answer(self, ask: Callable[[], T], deadline: float, growing: Path | None) -> T:
        """Return what a store answers. Raises TimeoutError after the deadline of `patiently`."""
        answer = Future[T]()

        def run() -> None:
            try:
                answer.set_result(ask())
            except BaseException as error:  # noqa: BLE001  # it is raised again
                answer.set_exception(error)

        # not a pool's thread: the process would wait for it at its end
        threading.Thread(target=run, daemon=True).start()
        size = 0
        while not wait([answer], _LOOK_S).done:
            with suppress(FileNotFoundError):
                if growing is not None and growing.stat().st_size > size:
                    size = growing.stat().st_size
                    deadline = max(deadline, time.monotonic() + self.timeout_s)
            if time.monotonic() > deadline:
                raise TimeoutError("no answer")
        return answer.result()

    def made(self, path: Path, make: Callable[[Path], None]) -> None:
        """Let `make` write a file of the cache to the path that it gets, unless the file is there.

        One process of the host does so, while others wait. Raises UsageError.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            while not path.exists():
                _make_once(path, make)
        except OSError as error:
            raise UsageError(
                f"cannot write to the cache {self.cache} ({error.strerror}): make room there, or "
                "give another cache or a smaller cache_size"
            ) from None

    def has_room_for(self, size: int) -> bool:
        """Return whether copies of this size, in all, can be kept."""
        # to add up the sizes of many copies takes long
        return (self.cache_size is None and size <= self._free_bytes()) or size <= self.room()

    def room(self) -> int:
        """Return how many bytes copies may have in all."""
        if self.cache_size is not None:
            return self.cache_size
        copies = self.cache / _COPIES
        copies.mkdir(parents=True, exist_ok=True)
        return self._free_bytes() + sum(map(_size_of, copies.iterdir()))

    def _free_bytes(self) -> int:
        """Return how much may be written without a limit."""
        self.cache.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(self.cache)
        return disk.free - int(_FREE * disk.total)

    def _make_room(self, partial: Path) -> None:
        """Remove the copies that were used longest ago until the one to be made fits."""
        size = _size_of(partial)
        copies = [*partial.parent.iterdir()]
        if self.cache_size is None:
            excess = size - self._free_bytes()
        else:
            excess = sum(map(_size_of, copies)) - self.cache_size
            if size > self.cache_size:
                raise UsageError(
                    f"a cache_size of {self.cache_size:,} bytes is less than one shard ({size:,})"
                )
        if excess <= 0:  # to sort many copies takes long
            return
        for path in sorted(copies, key=_last_use):
            if excess > 0 and _removed(path):
                excess -= _size_of(path)


def _make_once(path: Path, make: Callable[[Path], None]) -> None:
    """Make a file, or wait until another process is done with it."""
    partial = path.with_name(path.name + _PARTIAL)
    with open(partial, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not _is_at(file.fileno(), partial):  # another process had the lock
            return
        try:
            if not path.exists():
                make(partial)
                partial.replace(path)
                return
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        partial.unlink(missing_ok=True)


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _removed(path: Path) -> bool:
    """Remove a copy, unless a process makes it; return whether it was removed."""
    with suppress(OSError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(file.fileno(), path):
            path.unlink()
            return True
    return False


def _last_use(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


def _size_of(copy: Path) -> int:
    """Return the size that a copy has once it is whole, which its name tells."""
    found = re.match(r"\w+\.([0-9]+)\.", copy.name)
    return int(found[1]) if found else 0


def _unpack(path: Path, size: int) -> None:
    zstandard = plugin.library("zstandard", "shards compressed by zstd")
    packed = path.read_bytes()
    path.write_bytes(zstandard.ZstdDecompressor().decompress(packed, max_output_size=size))
    if (found := path.stat().st_size) != size:
        raise ValueError(f"it has {found:,} bytes, not {size:,}")


def _is_final(error: Exception) -> bool:
    """Return whether a repetition would fail, too."""
    cause = error.__cause__
    # fsspec says of any failure of a web server that the file is not there
    is_of_server = type(cause).__module__.startswith("aiohttp")
    is_other = is_of_server and getattr(cause, "status", None) != HTTPStatus.NOT_FOUND
    return isinstance(error, _FINAL) and not is_other


def _reason(error: BaseException) -> str:
    return without_secrets(f"{type(error).__name__}: {first_line(error)}")


def _expanded(path: str) -> list[str]:
    """Return the paths that {000..123} stands for, as in WebDataset."""
    if not (found := re.search(r"\{([0-9]+)\.\.([0-9]+)\}", path)):
        return [path]
    first, last = found.groups()
    numbers = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return [
        whole
        for number in numbers
        for whole in _expanded(path[: found.start()] + number + path[found.end() :])
    ]

"""A run folder in object storage, or in whatever fsspec knows: whole commits, each named by a manifest.

A manifest is a small object that is written last. It names each file of a commit with the object that holds it, its
size and its digest. No object that a manifest names is ever written again, so what a manifest says is there or, where
somebody has changed it, recognised.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from hvd_train import remote_url
from hvd_train.console import printable
from hvd_train.errors import UsageError
from hvd_train.run_files import durable
from hvd_train.run_files.masked import masked

T = TypeVar("T")
OWNER, COMMITS = "owner.json", "commits"
ANSWER_S = 60.0
_MANIFEST = re.compile(r"manifest-(\d{12})-([0-9a-f]{8})\.json")
_FILE = re.compile(r"(?:(?:checkpoints|tensorboard)/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_CHECKPOINT = re.compile(r"checkpoints/step-(\d{10})\.ckpt")
_MOST_FILES = 10_000
_MOST_BYTES = 2**22  # of a manifest
_PIECE_BYTES = 2**20
_LEAST_PART_BYTES, _MOST_PARTS = 2**23, 5_000  # of an upload; S3 takes 10,000 parts
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "r2")  # without folders
_INSTALL = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # our extra for a protocol


class Damaged(Exception):
    """A manifest or a file that is not what a commit has written, with the reason."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a commit."""

    name: str
    """Its path in the run folder."""
    at: str
    """The object that holds it, from the run's URL on."""
    size: int
    digest: str


@dataclass(frozen=True)
class Commit:
    """What a manifest says."""

    manifest: str
    """The name of its object."""
    run: str
    """The life of a run folder that it belongs to: one that was begun anew at the same URL has another."""
    files: tuple[RemoteFile, ...]

    @property
    def step(self) -> int:
        """The step of its checkpoint."""
        return max(int(match[1]) for file in self.files if (match := _CHECKPOINT.fullmatch(file.name)))

    def text(self) -> str:
        """Return the text of its manifest."""
        files = [vars(file) for file in self.files]
        return json.dumps({"format": 1, "run": self.run, "files": files}, indent=1) + "\n"


class Remote:
    """The objects of a run. Whatever goes wrong on the way there, its methods raise the library's own exceptions."""

    def __init__(self, url: str) -> None:
        """Prepare to use the objects below `url`; nothing is sent. Raises UsageError as `check` does."""
        check(url)
        import fsspec

        self.url = url
        protocol = url.partition("://")[0]
        self._has_folders = protocol not in _OBJECT_STORES
        # An instance of its own, since a cached one may stem from before a fork; and no listing from memory.
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        self._system, self._root = fsspec.core.url_to_fs(url, **options)

    def names(self) -> list[str]:
        """Return the names of what lies directly in the run folder; there is none where the folder is missing."""
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        inside = [str(path).rstrip("/") for path in found]
        return [path.rpartition("/")[2] for path in inside if path.rpartition("/")[0].endswith(self._root.strip("/"))]

    def objects(self) -> set[str]:
        """Return all objects of commits, as `RemoteFile.at` has them."""
        self._system.invalidate_cache()
        try:
            found = self._system.find(f"{self._root}/{COMMITS}")
        except FileNotFoundError:
            return set()
        return {f"{COMMITS}/{str(path).rpartition(f'/{COMMITS}/')[2]}" for path in found}

    def read(self, name: str, most_bytes: int = _MOST_BYTES) -> bytes:
        """Return what a small object holds. Raises Damaged where it is a large one."""
        content = self._system.cat_file(f"{self._root}/{name}", start=0, end=most_bytes + 1)
        if len(content) > most_bytes:
            raise Damaged(f"{name} is larger than {most_bytes:,} bytes")
        return bytes(content)

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, which is whole or absent: stores of objects see to that, elsewhere it is renamed."""
        self._make_folder_of(name)
        path = f"{self._root}/{name}"
        if not self._has_folders:
            self._system.pipe_file(path, content)
            return
        self._system.pipe_file(path + durable.PARTIAL_SUFFIX, content)
        self._system.mv(path + durable.PARTIAL_SUFFIX, path)

    def upload(self, file: BinaryIO, size: int, at: str, moved: Callable[[int], None]) -> tuple[int, str]:
        """Write an object with what `file` holds, at most `size` bytes, and return their number and digest.

        `moved` is called with the number of bytes as they go.
        """
        self._make_folder_of(at)
        digest, done = hashlib.blake2b(digest_size=32), 0
        part = max(_LEAST_PART_BYTES, -(-size // _MOST_PARTS))
        with self._system.open(f"{self._root}/{at}", "wb", block_size=part) as remote:
            while piece := file.read(min(_PIECE_BYTES, size - done)):
                remote.write(piece)
                digest.update(piece)
                done += len(piece)
                moved(len(piece))
        return done, digest.hexdigest()

    def remove(self, name: str) -> None:
        """Remove an object that may be gone already."""
        with suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")
        folder = name.rpartition("/")[0]
        while self._has_folders and folder not in ("", COMMITS):
            try:
                self._system.rmdir(f"{self._root}/{folder}")
            except Exception:  # noqa: BLE001  # it holds more, or is gone; an empty one does no harm
                return
            folder = folder.rpartition("/")[0]

    def commits(self, report: Callable[[str], None]) -> Iterator[Commit]:
        """Yield what the manifests say, newest first; those that are damaged are named to `report`."""
        for name in sorted(manifests(self.names()), reverse=True):
            try:
                yield parse(name, self.read(name))
            except FileNotFoundError:
                continue  # a newer one has taken its place
            except Damaged as error:
                report(f"skipping a damaged manifest in {self.url}: {error}")

    def fetch(self, commit: Commit, folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Write the wanted files of a commit into a folder, and nothing that it does not name; what was there goes.

        Raises Damaged where they are not what it says, and OSError where the disk has no room.
        """
        _empty(folder)
        files = [file for file in commit.files if wanted(file.name)]
        for file in files:
            self._check_size(file, commit)
        if sum(file.size for file in files) > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        for file in files:
            path = folder / file.name
            path.parent.mkdir(exist_ok=True)
            digest, left = hashlib.blake2b(digest_size=32), file.size
            try:
                with durable.writing(path) as local, self._system.open(f"{self._root}/{file.at}", "rb") as remote:
                    while left >= 0 and (piece := remote.read(_PIECE_BYTES)):
                        left -= len(piece)
                        if left >= 0:
                            digest.update(piece)
                            local.write(piece)
                    if left or digest.hexdigest() != file.digest:
                        raise Damaged(f"{file.at} is not what {commit.manifest} says")
            except FileNotFoundError:
                raise Damaged(f"{file.at} is missing, which {commit.manifest} names") from None

    def _check_size(self, file: RemoteFile, commit: Commit) -> None:
        try:
            size = self._system.info(f"{self._root}/{file.at}")["size"]
        except FileNotFoundError:
            raise Damaged(f"{file.at} is missing, which {commit.manifest} names") from None
        if size not in (None, file.size):
            raise Damaged(f"{file.at} has not the size that {commit.manifest} says")

    def _make_folder_of(self, name: str) -> None:
        if self._has_folders:  # in a store of objects it would make the bucket
            self._system.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)


def parse(manifest: str, content: bytes) -> Commit:
    """Return what a manifest of this name says. Raises Damaged for anything that this package does not write.

    Anybody may have written it: no name in it leads out of the run folder, nor out of the commits of its URL.
    """
    try:
        values = json.loads(content)
        files = tuple(RemoteFile(**file) for file in values["files"])
        run = values["run"]
        if values["format"] != 1 or not (isinstance(run, str) and re.fullmatch(r"[0-9a-f]{32}", run)):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(f"{manifest} is no manifest") from None
    for file in files:
        texts = all(isinstance(text, str) for text in (file.name, file.at, file.digest))
        if not (texts and type(file.size) is int and file.size >= 0 and is_plain(file.name)):
            raise Damaged(f"{manifest} names what is no file of a run")
        folder, _, rest = file.at.removeprefix(f"{COMMITS}/").partition("/")
        if (
            not re.fullmatch(r"\d{12}-[0-9a-f]{8}", folder)
            or file.at != f"{COMMITS}/{folder}/{rest}"
            or rest != file.name
        ):
            raise Damaged(f"{manifest} names an object that is none of a commit")
    names = {file.name for file in files}
    if len(names) != len(files) or len(files) > _MOST_FILES or not {"config.yaml"} < names:
        raise Damaged(f"{manifest} names no whole commit")
    if not any(map(_CHECKPOINT.fullmatch, names)):
        raise Damaged(f"{manifest} names no checkpoint")
    return Commit(manifest, run, files)


def manifests(names: list[str]) -> set[str]:
    """Return the names of manifests among these."""
    return {name for name in names if _MANIFEST.fullmatch(name)}


def number_of(manifest: str) -> int:
    """Return which commit the manifest of this name is of."""
    match = _MANIFEST.fullmatch(manifest)
    assert match is not None
    return int(match[1])


def manifest_name(number: int, token: str) -> str:
    """Return the name of the object of a manifest."""
    return f"manifest-{number:012d}-{token}.json"


def is_plain(name: str) -> bool:
    """Return whether this is the path of a file that a run may write into its folder."""
    return _FILE.fullmatch(name) is not None and not name.endswith(durable.PARTIAL_SUFFIX) and name.count("..") == 0


def is_ours(names: list[str]) -> bool:
    """Return whether what lies in a remote folder is a run, or nothing at all."""
    whole = {name.removesuffix(durable.PARTIAL_SUFFIX) for name in names}
    return whole - manifests(list(whole)) <= {OWNER, COMMITS}


def check(url: str, flag: str = "--output-dir") -> None:
    """Raise UsageError where fsspec does not know such URLs, or the library for them is missing."""
    remote_url.check(url, flag)
    import fsspec

    protocol, named = url.partition("://")[0], f"{flag} {url}".strip()
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise UsageError(f"{named}: unknown protocol {protocol!r}; known are s3, gs and those of fsspec") from None
    except ImportError as error:
        extra = _INSTALL.get(protocol)
        told = f"pip install 'hvd_train[{extra}]'" if extra else str(error).partition("\n")[0]
        raise UsageError(f"{named}: the library for {protocol} is missing: {told}") from None


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of work that may hang. Raises TimeoutError where there is none after so many seconds."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001  # it is raised where the result is wanted
            result.set_exception(error)

    threading.Thread(target=run, name="remote", daemon=True).start()
    wait([result], seconds)
    if not result.done():
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return result.result()


def why(error: BaseException) -> str:
    """Return in one line, without any secret, what has gone wrong with a remote file system."""
    text = masked(" ".join(str(error).split()) or type(error).__name__)
    text = re.sub(r"\?\S*", "", text)  # of an address: what signs it stands there
    return printable(text if len(text) <= 200 else f"{text[:200]} ...")


def refused(url: str, error: BaseException, flag: str = "--output-dir") -> UsageError:
    """Return the error of a run folder that cannot be reached or written."""
    return UsageError(f"{flag} {url}: {why(error)}; nothing was started")


def fetch_newest(url: str, folder: Path, wanted: Callable[[str], bool], report: Callable[[str], None]) -> Commit:
    """Write the wanted files of the newest whole commit of a run into an empty folder, to be read there.

    Raises UsageError where there is none, or the run cannot be reached.
    """
    remote = Remote(url)
    notes = list[str]()
    try:
        for _ in range(3):  # a training that goes on may remove a commit while it is fetched
            notes.clear()
            for commit in within(ANSWER_S, lambda: list(remote.commits(notes.append))):
                try:
                    remote.fetch(commit, folder, wanted)
                except Damaged as error:
                    notes.append(f"skipping a damaged commit in {url}: {error}")
                else:
                    for note in notes:
                        report(note)
                    return commit
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  # each library has its own
        raise UsageError(f"{url}: {why(error)}") from None
    raise UsageError(f"{url}: there is no whole commit of a run of hvd_train" + "".join(f"; {note}" for note in notes))

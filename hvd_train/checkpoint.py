"""Committed checkpoints: written in the background, atomic, checked when they are read.

A file is a line of magic, a line of JSON (digest, size, whether all ranks held this state, progress) and a payload of
torch.save that loads with weights_only=True. `head -2` of it says what it is.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor
from typing_extensions import Buffer, override

from hvd_train import plain_file, weights_file
from hvd_train.errors import UsageError
from hvd_train.network import safetensors_file
from hvd_train.network.weights import UNREADABLE, tensors_in
from hvd_train.run_files import durable
from hvd_train.run_files.durable import Permission, always
from hvd_train.state import Snapshot, TrainState, result_in, to_host

BEST, FINAL = weights_file.BEST, weights_file.FINAL
MAGIC = b"hvd_train checkpoint 1\n"
_HEADER_SIZE = 512
_PIECE_BYTES = 1 << 20
_NAME = re.compile(r"step-(\d{10})\.ckpt")

Report = Callable[[str], None]
"""Takes a sentence for the user."""


class BadCheckpoint(Exception):
    """A file that is not a whole checkpoint, with the reason."""


class Store(Protocol):
    """Takes the commits and the weights of a training."""

    @property
    def is_busy(self) -> bool:
        """Whether a commit would not be taken now."""

    def commit(self, state: TrainState) -> bool:
        """Keep this state in a checkpoint, in the background; return whether it is taken.

        It is not where the disk is still busy with the one before: try again at the next step.
        """

    def commit_last(self, state: TrainState, *, final_weights: bool = False) -> Future[bool]:
        """Keep this state in a checkpoint after all that is still being written, and the final weights if asked to.

        The result is there when all is on disk, and says whether it is. The state may be changed meanwhile.
        """

    def save_weights(self, name: str, state: TrainState) -> None:
        """Write the plain state_dict of the state's result into the file `name` of the run folder, and wait for it.

        The suffix of the name is that of the run's format of weights.

        The best weights are gone with the next step: should this process die in that step, they must be on disk. Where
        they do not fit, they are kept in memory, and written with a later commit.
        """

    def close(self) -> None:
        """Wait for what is being written."""


class NoStore(Store):
    """The store of ranks that do not write: it takes everything and keeps nothing."""

    is_busy = False

    @override
    def commit(self, state: TrainState) -> bool:
        return True

    @override
    def commit_last(self, state: TrainState, *, final_weights: bool = False) -> Future[bool]:
        done: Future[bool] = Future()
        done.set_result(True)
        return done

    @override
    def save_weights(self, name: str, state: TrainState) -> None:
        pass

    @override
    def close(self) -> None:
        pass


class DiskStore(Store):
    """Writes checkpoints in a thread of its own: training waits for the copy only.

    A write that fails (disk full) is reported in one line, as is the first one that fits again, and training goes on;
    older files are removed only after a newer one is safe.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        config: Mapping[str, Any],
        report: Report,
        permission: Permission = always,
        weights_format: str = "pt",
        committed: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to write into the run folder; nothing is written where `permission`, asked for each file, says no.

        `committed` is called after each commit that is on disk.
        """
        self.folder, self._keep, self._config, self._report = folder, keep, dict(config), report
        self._permission, self._weights_format, self._committed = permission, weights_format, committed
        with suppress(OSError):  # what cannot be removed or made now is no reason not to train
            (folder / "checkpoints").mkdir(exist_ok=True)
            durable.remove_partial(folder / "checkpoints")
            durable.remove_partial(folder)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[bool] | None = None
        self._unwritten: dict[str, dict[str, Tensor]] = {}
        self._weights_lock = threading.Lock()  # best weights are written by the thread that trains
        self._failing = False

    @property
    @override
    def is_busy(self) -> bool:
        return self._last is not None and not self._last.done()

    @override
    def commit(self, state: TrainState) -> bool:
        if self.is_busy:
            return False
        snapshot = self._snapshot(state)
        self._last = self._writer.submit(lambda: self._commit(snapshot))
        return True

    @override
    def commit_last(self, state: TrainState, *, final_weights: bool = False) -> Future[bool]:
        snapshot = self._snapshot(state)

        def write_all() -> bool:
            saved = self._commit(snapshot, last=True)
            with self._weights_lock:
                if final_weights:
                    self._unwritten[FINAL] = result_in(snapshot)
                return self._write_weights(last=True) and saved

        self._last = self._writer.submit(write_all)
        return self._last

    @override
    def save_weights(self, name: str, state: TrainState) -> None:
        with self._weights_lock:
            self._unwritten[name] = to_host(state.result.state_dict())
            self._write_weights()

    @override
    def close(self) -> None:
        self._writer.shutdown(wait=True)

    def _snapshot(self, state: TrainState) -> Snapshot:
        return {**state.snapshot(), "config": self._config}

    def _commit(self, snapshot: Snapshot, *, last: bool = False) -> bool:
        step = snapshot["progress"]["step"]
        path = path_of(self.folder, step)
        try:
            write(path, snapshot, self._permission)
        except OSError as error:
            if last or not self._failing:
                newest = next(iter(committed(self.folder)), None)
                good = f"the newest good checkpoint is {newest.name}" if newest else "there is no checkpoint yet"
                goes_on = "" if last else "training goes on, "
                self._report(f"cannot write {path}: {error.strerror}; {goes_on}{good}")
            self._failing = True
            return False
        if self._failing:
            self._failing = False
            self._report(f"commits fit again: step {step} is on disk")
        # What has a higher number was skipped as damaged when this run was resumed: it must not push out good ones.
        older = [old for old in committed(self.folder) if old.name <= path.name]
        dropped = older[self._keep :]
        if dropped and (verified := next(filter(is_verified, older), None)) in dropped:
            dropped.remove(verified)
        for old in dropped:
            with suppress(OSError):
                old.unlink(missing_ok=True)
        if not last and self._unwritten:
            with self._weights_lock:
                self._write_weights(quietly=True)
        self._committed()
        return True

    def _write_weights(self, *, quietly: bool = False, last: bool = False) -> bool:
        """Write the weights that are not on disk yet, and return whether all are there now."""
        for name, weights in list(self._unwritten.items()):
            path = (self.folder / name).with_suffix(f".{self._weights_format}")
            try:
                write_weights(path, weights, self._permission)
                for other in {".pt", weights_file.SAFETENSORS} - {path.suffix}:  # of this run before it was resumed
                    path.with_suffix(other).unlink(missing_ok=True)
            except OSError as error:
                if not quietly:
                    kept = "" if last else "; it is kept in memory until it fits"
                    self._report(f"cannot write {path}: {error.strerror}{kept}")
            else:
                del self._unwritten[name]
        return not self._unwritten


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return folder / "checkpoints" / f"step-{step:010d}.ckpt"


def step_of(path: Path) -> int:
    """Return the step that the name of a checkpoint of a run folder says."""
    return int(path.stem.removeprefix("step-"))


def committed(folder: Path) -> list[Path]:
    """Return the checkpoints of a run folder, newest first; they may be damaged."""
    return sorted((p for p in (folder / "checkpoints").glob("*.ckpt") if _NAME.fullmatch(p.name)), reverse=True)


def newest_good(folder: Path, report: Report) -> Snapshot | None:
    """Return the newest whole checkpoint, or None; damaged ones are named to `report` and left where they are.

    So is one that is not verified, where an older one is: it is taken all the same, for it has more steps.
    """
    paths = committed(folder)
    for number, path in enumerate(paths):
        try:
            snapshot = read(path)
        except BadCheckpoint as error:
            report(f"skipping a damaged checkpoint: {error}")
            continue
        verified = None if is_verified(path) else next(filter(is_verified, paths[number + 1 :]), None)
        if verified is not None:
            report(
                f"going on from step {step_of(path)}, committed when a rank was lost, before the states of all ranks "
                f"were compared; the last commit in which they agreed is of step {step_of(verified)}: to go back to "
                f"it, stop and type `mv {path} {aside(path)}`"
            )
        return snapshot
    return None


def newest_verified(folder: Path, report: Report, *, not_after: int | None = None) -> Snapshot | None:
    """Return the newest whole checkpoint that is verified and, where there is such a one, of no step `not_after` this.

    Where none is verified, it is what `newest_good` returns. Whole ones that are newer are moved aside, and named to
    `report`: nobody is to go on from them.
    """
    whole = list[Path]()
    for path in committed(folder):
        try:
            check(path)
        except BadCheckpoint as error:
            report(f"skipping a damaged checkpoint: {error}")
        else:
            whole.append(path)
    verified = [path for path in whole if is_verified(path)]
    if not verified:
        return newest_good(folder, lambda told: None)
    early = (path for path in verified if not_after is None or step_of(path) <= not_after)
    chosen = next(early, verified[0])
    snapshot = read(chosen)
    for newer in whole[: whole.index(chosen)]:
        newer.rename(aside(newer))
        report(
            f"going back to step {step_of(chosen)}, in which all ranks agreed; {newer.name}, of which that is not "
            f"known, is now {aside(newer).name}"
        )
    return snapshot


def is_verified(path: Path) -> bool:
    """Return whether all ranks held the same state, bit for bit, when this checkpoint was made: its header says it.

    A file of old that does not say, or that is damaged there, is not.
    """
    try:
        with plain_file.opened(path) as file:
            return _header(path, file).get("verified") is True
    except (OSError, BadCheckpoint):
        return False


def aside(path: Path) -> Path:
    """Return the path that a checkpoint gets which is kept, but from which no run goes on by itself."""
    return path.with_name(f"{path.stem}-doubted.ckpt")


def write(path: Path, snapshot: Snapshot, permission: Permission = always) -> None:
    """Write a checkpoint durably. Raises OSError where the disk does not take it, or there is no `permission`.

    It goes into the file without a copy in between: training on the same cores pays for each.
    """
    path.parent.mkdir(exist_ok=True)
    with durable.writing(path, permission) as file:
        file.write(MAGIC)
        file.write(b" " * _HEADER_SIZE)  # what stands here is known when all the rest is written
        payload = _Digested(file)
        with _without_crc32():
            _save(snapshot, payload)
        progress = snapshot["progress"]
        verified = snapshot.get("verified_step") == progress["step"]
        header = {"digest": payload.digest.hexdigest(), "size": payload.size, "verified": verified, **progress}
        line = json.dumps(header).encode().ljust(_HEADER_SIZE - 1) + b"\n"
        assert len(line) == _HEADER_SIZE
        file.seek(len(MAGIC))
        file.write(line)


def _save(value: Mapping[str, Any], file: Any) -> None:
    """Call torch.save, and raise the OSError that it hides behind an error of its own."""
    try:
        torch.save(value, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


class _Digested:
    """A file for torch.save that computes the digest of what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.digest = file, 0, hashlib.blake2b(digest_size=32)

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Have torch.save leave out its own checksums inside this block: ours covers all that is written."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def read(path: Path) -> Snapshot:
    """Return the snapshot in a file. Raises BadCheckpoint, naming the file, where it is not whole or not ours.

    The tensors are filled from the file, so that this takes the memory of the snapshot and no more.
    """
    with _whole(path) as payload:
        try:
            snapshot: Snapshot = torch.load(payload, map_location="cpu", weights_only=True)
        except UNREADABLE:
            raise BadCheckpoint(f"{path} holds more than plain values and tensors; it is not loaded") from None
    return snapshot


def check(path: Path) -> None:
    """Raise BadCheckpoint as `read` does where a file is not what a commit has written; it is not loaded for that."""
    with _whole(path):
        pass


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """Open what follows the header of a checkpoint. Raises BadCheckpoint where its size or its digest is wrong."""
    try:
        with plain_file.opened(path) as file:
            header = _header(path, file)
            size, digest = header["size"], header["digest"]
            there = os.fstat(file.fileno()).st_size - file.tell()
            if there != size:
                raise BadCheckpoint(f"{path} is truncated: {there} of {size} bytes")
            if there > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                raise BadCheckpoint(f"{path} is larger than the memory")
            payload = _Payload(file)
            if payload.digest() != digest:
                raise BadCheckpoint(f"{path}: its contents do not match their checksum")
            yield io.BufferedReader(payload)
    except OSError as error:
        raise BadCheckpoint(f"{path}: {error.strerror}") from None


class _Payload(io.RawIOBase):
    """What follows in a file from here on, as a file of its own: torch.load reads each tensor into its place."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._begin = file, file.tell()

    def digest(self) -> str:
        """Return the digest of all of it, and go back to its beginning."""
        digest = hashlib.blake2b(digest_size=32)
        while piece := self._file.read(_PIECE_BYTES):
            digest.update(piece)
        self.seek(0)
        return digest.hexdigest()

    @override
    def seekable(self) -> bool:
        return True

    @override
    def readable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset + (self._begin if whence == os.SEEK_SET else 0), whence) - self._begin

    @override
    def readinto(self, buffer: Buffer) -> int:
        return self._file.readinto(buffer)  # type: ignore[attr-defined,no-any-return]  # BinaryIO lacks it


def _header(path: Path, file: BinaryIO) -> dict[str, Any]:
    """Read the header of a checkpoint, with the size and the digest of what follows. Raises BadCheckpoint, OSError."""
    magic = file.readline(64)
    if magic != MAGIC:
        if magic.startswith(MAGIC[:-3]):
            raise BadCheckpoint(f"{path} was written by another version of hvd_train")
        raise BadCheckpoint(f"{path} is not a checkpoint of hvd_train")
    try:
        header = json.loads(file.readline(4096))
        if {"size", "digest"} <= header.keys():
            return dict(header)
    except (ValueError, AttributeError, RecursionError):
        pass
    raise BadCheckpoint(f"{path}: its header is damaged") from None


def read_named(path: Path) -> Snapshot:
    """Return the snapshot in a file that the user named. Raises UsageError where it cannot be used."""
    try:
        return read(path)
    except BadCheckpoint as error:
        raise UsageError(str(error)) from None


def read_weights(path: Path) -> dict[str, Tensor] | None:
    """Return the plain state_dict in a file, on the CPU; None where it cannot be read."""
    try:
        weights: dict[str, Tensor] = tensors_in(path)
    except UNREADABLE:
        return None
    return weights


def write_weights(path: Path, weights: Mapping[str, Tensor], permission: Permission = always) -> None:
    """Write a plain state_dict durably. Raises OSError where the disk does not take it, or there is no `permission`."""
    with durable.writing(path, permission) as file:
        if path.suffix == weights_file.SAFETENSORS:
            safetensors_file.write(file, weights)
        else:
            _save(weights, file)

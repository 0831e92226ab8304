"""Write checkpoints atomically in the background: two lines of text and a payload of torch.save."""

import errno
import hashlib
import json
import mmap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hvd_train import plain_file
from hvd_train.config import Config
from hvd_train.errors import UsageError, first_few
from hvd_train.network.weights import UNREADABLE, for_file, tensors_in, why_not_read_again
from hvd_train.run_files import durable
from hvd_train.run_files.commits import (
    MAGIC,
    PAYLOAD_AT,
    committed,
    firsts_of_intervals,
    is_verified,
    path_of,
)
from hvd_train.run_files.run_folder import NoneReadable, RunFolder
from hvd_train.state import Snapshot, TrainState, result_in, to_host

BEST = "model-best.pt"
FINAL = "model-final.pt"
DISTRUSTED = ".distrusted"
_BEST_FILES = (BEST, "model-best.safetensors")
Report = Callable[[str], None]  # prints a line for the user


class BadCheckpoint(UsageError):
    """A file is not a whole checkpoint."""


class Store:
    """Writes files of a training in its own thread.

    If the disk is full, training continues, and a line reports it.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        config: Config,
        report: Report,
        committed: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to write into the run folder; `committed` is called after each commit."""
        self._run_folder = run_folder
        self._config = config
        self._report = report
        self._committed = committed
        self.folder = run_folder.path
        with suppress(OSError):  # training does not need it
            for leftover in self.folder.glob(f"checkpoints/*{durable.PARTIAL_SUFFIX}"):
                leftover.unlink()
                time = "HVD_TRAIN_GRACE_SECONDS is the time for one when a job is stopped"
                report(
                    f"the commit {leftover.stem} was cut off, since its process was killed; {time}"
                )
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._keep, self._every = config.run.checkpoints_to_keep
        self._trusted_step = 0  # of the last commit
        self._last: Future[bool] | None = None
        self._unwritten: dict[str, dict[str, Tensor]] = {}

    def distrust(self, trusted_step: int) -> None:
        """Put aside commits and best weights after a step: a rank may have computed wrongly."""
        self._writer.submit(self._put_aside, trusted_step).result()

    def _put_aside(self, trusted_step: int) -> None:
        kept = [path for path in committed(self.folder) if _is_trusted(path, trusted_step)]
        before = kept[0].stat().st_mtime_ns if kept else 0
        files = [self.folder / name for name in _BEST_FILES if (self.folder / name).exists()]
        best = [path for path in files if path.stat().st_mtime_ns > before]
        for path in {*committed(self.folder)} - {*kept} | {*best}:
            path.rename(path.with_name(path.name + DISTRUSTED))

    @property
    def is_free(self) -> bool:
        """Whether the last checkpoint is finished."""
        return self._last is None or self._last.done()

    def commit(self, state: TrainState, *, verified: bool) -> bool:
        """Write a checkpoint in the background; return False if the last one is unfinished.

        It is `verified` if all ranks have compared this state.
        """
        if not self.is_free:
            return False
        self.commit_last(state, verified=verified)
        return True

    def commit_last(
        self, state: TrainState, *, verified: bool = False, final_weights: bool = False
    ) -> Future[bool]:
        """Write a checkpoint, as `commit` does, and `final_weights` after earlier writes; the
        result is whether all is on disk.
        """
        self._trusted_step = state.trusted_step
        snapshot = {
            **state.snapshot(),
            "config": self._config.as_dict(),
            "verified": verified,
        }

        def write_all() -> bool:
            saved = self._commit(snapshot)
            return (
                self._write_weights({FINAL: result_in(snapshot)} if final_weights else {}) and saved
            )

        self._last = self._writer.submit(write_all)
        return self._last

    def save_weights(self, name: str, state: TrainState) -> None:
        """Write the weights of `state.result`, now or, if the disk is full, with a commit."""
        self._writer.submit(
            self._write_weights, {name: to_host(for_file(state.result.state_dict()))}
        ).result()

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.shutdown(wait=True)

    def _commit(self, snapshot: Snapshot) -> bool:
        path = path_of(self.folder, snapshot["progress"]["step"])
        if why := why_not_read_again(snapshot):
            self._report(
                f"not written, since it could not be read again: {path} ({why}); "
                "earlier checkpoints stay"
            )
            return False
        try:
            path.parent.mkdir(exist_ok=True)
            self._write(f"checkpoints/{path.name}", lambda file: write_into(file, snapshot))
        except OSError as error:
            self._report(f"cannot write {path}: {error.strerror}; earlier checkpoints stay")
            return False
        # Newer files were damaged when this run was resumed; they must not push out good ones.
        older = [old for old in committed(self.folder) if old.name <= path.name]
        self._remove_all_but(self._keep, older)
        self._committed()
        return True

    def _remove_all_but(self, number: int, newest_first: Sequence[Path]) -> bool:
        """Remove all but the newest checkpoints, but never the newest trusted one; return whether
        one was removed.
        """
        verified = [*filter(is_verified, newest_first)]
        trusted = [path for path in verified if _is_trusted(path, self._trusted_step)]
        stays = [*newest_first[:number], *(trusted or verified or newest_first)[:1]]
        if self._every:
            stays += firsts_of_intervals(newest_first, self._every)
        superfluous = [path for path in newest_first if path not in stays]
        for path in superfluous:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return bool(superfluous)

    def _write(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        """Write a file; if the disk is full, again with fewer checkpoints, but never without one.

        Raises OSError.
        """
        try:
            with self._run_folder.writing(name) as file:
                write(file)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            there = committed(self.folder)
            while there and not _is_whole(there[0]):
                del there[0]
            keeps_more = self._keep > 1 or self._every > 0
            self._every = 0
            if not self._remove_all_but(0 if self._keep == 1 else 1, there):
                raise
            if keeps_more:
                self._report("the disk is full: from now on only the newest checkpoint stays")
            self._keep = 1
            with self._run_folder.writing(name) as file:
                write(file)

    def _write_weights(self, new: Mapping[str, dict[str, Tensor]]) -> bool:
        """Write new weights and the pending ones; return whether all are on disk."""
        self._unwritten.update(new)
        for name, weights in list(self._unwritten.items()):
            try:
                self._write(name, partial(_save, weights))
                if self._config.run.weights_format == "safetensors":
                    self._write(
                        f"{name.removesuffix('.pt')}.safetensors",
                        partial(_save_safetensors, weights),
                    )
            except OSError as error:
                self._report(f"cannot write {self.folder / name}: {error.strerror}")
            else:
                del self._unwritten[name]
        return not self._unwritten


def _is_whole(path: Path) -> bool:
    try:
        read(path)
    except UsageError:
        return False
    return True


def newest_good(folder: Path, report: Report) -> Snapshot | None:
    """Return the newest whole checkpoint, None if there is no checkpoint; damaged
    ones are reported and stay.

    Raises NoneReadable if all are damaged.
    """
    damaged = []
    for path in committed(folder):
        try:
            snapshot = read(path)
        except BadCheckpoint as error:
            damaged.append(str(error))
        else:
            for line in damaged:
                report(f"skipping a damaged checkpoint: {line}")
            return snapshot
    if damaged:
        raise NoneReadable(
            f"no checkpoint of {folder} can be read: {first_few(damaged, 3)}; put back a copy of "
            "one, or type --resume never to start again (the old run is kept aside)"
        )
    return None


def write_into(file: BinaryIO, snapshot: Snapshot) -> None:
    """Write a checkpoint into an open file, without a copy in between. Raises OSError."""
    file.write(MAGIC)
    file.write(b" " * (PAYLOAD_AT - len(MAGIC)))  # the header is known when the rest is written
    payload = _Digested(file)
    _save(snapshot, payload)
    header = {
        "digest": payload.digest.hexdigest(),
        "verified": snapshot.get("verified", False),
        **snapshot["progress"],
    }
    line = json.dumps(header).encode().ljust(PAYLOAD_AT - len(MAGIC) - 1) + b"\n"
    file.seek(len(MAGIC))
    file.write(line)


def _save(value: Mapping[str, Any], file: Any) -> None:
    try:
        torch.save(value, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # which torch hides behind an error of its own
            raise error.__context__ from None
        raise


def _save_safetensors(weights: Mapping[str, Tensor], file: BinaryIO) -> None:
    from safetensors.torch import save

    file.write(save({key: tensor.contiguous() for key, tensor in weights.items()}))


class _Digested:
    """A file for torch.save that computes the digest of what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.blake2b(digest_size=32)

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def read(path: Path) -> Snapshot:
    """Return the snapshot in a file.

    Raises BadCheckpoint, which names a file that is damaged or no checkpoint.
    """
    try:
        with plain_file.opened(path) as file:
            if file.readline(64) != MAGIC:
                raise BadCheckpoint(f"{path} is not a checkpoint of hvd_train")
            header = json.loads(file.readline(PAYLOAD_AT))
            # The file is mapped, so that loading needs no second copy in memory.
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, offset=PAYLOAD_AT) as payload:
                if hashlib.blake2b(payload, digest_size=32).hexdigest() != header["digest"]:
                    raise BadCheckpoint(
                        f"{path} is damaged: its contents do not match their checksum"
                    )
                snapshot: Snapshot = torch.load(payload, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
                return snapshot
    except OSError as error:
        raise BadCheckpoint(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadCheckpoint(f"{path}: its header is damaged") from None
    except UNREADABLE:
        raise BadCheckpoint(
            f"{path} holds more than plain values and tensors; it is not loaded"
        ) from None


def _is_trusted(path: Path, trusted_step: int) -> bool:
    """Return whether ranks have compared a commit, and then what they compute."""
    return is_verified(path) and path.name <= path_of(path.parents[1], trusted_step).name


def read_weights(path: Path) -> dict[str, Tensor] | None:
    """Return the state_dict in a file, on the CPU; None if it cannot be read."""
    try:
        return dict[str, Tensor](tensors_in(path))
    except UNREADABLE:
        return None

"""Choose, claim and lock run folders: one process at a time writes into one."""

import fcntl
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import IO, BinaryIO

from hvd_train import config_file, plain_file
from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.run_files import durable
from hvd_train.run_files.durable import AppendedFile

RUNS = Path("runs")
CONFIG = "config.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
ENVIRONMENT = "environment.json"
RANKS = "ranks.json"
FROM_FILE = "from_file"  # the event that a run resumes from the checkpoint of another run
DATA = "data.json"
WEIGHTS = "sample-weights.npy"  # by which samples are drawn, for the audit
TAKEN = ("checkpoints", "profile", "tensorboard")  # other folders in a run folder
_LOCK = ".lock"
_TRIES = 20  # to lock a folder whose lock file changes meanwhile
_WRITTEN_IN_PLACE = (_LOCK, METRICS, "ledger.jsonl")


Find = Callable[[Path | None], None]
"""Finds the state with which a run continues in its folder, or with which a new one begins."""


class Busy(UsageError):
    """Raised if another process trains in the folder `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"another process is training in {path}; wait for it, or name another --output-dir"
        )
        self.path = path


class NoneReadable(UsageError):
    """Raised if a run has checkpoints, but none that can be read: only
    the user may begin it again.
    """


@dataclass(frozen=True)
class RunFolder:
    """A run folder that this process has claimed. The claim ends with the process."""

    path: Path
    earlier: bool = False  # whether the same run has trained in it before
    notes: tuple[str, ...] = ()  # for the user, about the choice of the folder and its checkpoint
    # whether a checkpoint that the user named was loaded, so that the folder has none yet
    from_file: bool = False
    _lock: IO[str] | None = None

    def held(self) -> bool:
        """Return whether the claim still holds: a job that evicted this
        process takes over the folder.
        """
        return self._lock is None or _is_lock_of(self.path, self._lock)

    def writing(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file as `durable.writing` does. Raises OSError, also if the claim is lost."""
        return durable.writing(self.path / name, self.held)

    def write(self, name: str, text: str) -> None:
        """Write a whole file in UTF-8. Raises OSError, also if the claim is lost."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a whole file. Raises OSError, also if the claim is lost."""
        with self.writing(name) as file:
            file.write(content)

    def append(self, name: str, report: Callable[[str], None]) -> AppendedFile:
        """Return a file of the folder to append to; entries are dropped once the claim is lost."""
        return AppendedFile(self.path / name, report, self.held)

    def release(self) -> None:
        """End the claim."""
        if self._lock is not None:
            self._lock.close()


def in_use(path: Path) -> bool:
    """Return whether a process of this machine has locked the folder."""
    try:
        inode = (path / _LOCK).stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any(" FLOCK " in line and f":{inode} " in line for line in lines)


def claim(
    config: Config,
    now: datetime,
    find: Find = lambda folder: None,
    *,
    name: str = "",
    wait: bool = False,
    evict: bool = False,
) -> RunFolder:
    """Choose and lock the folder of this run, and write its config.yaml; a run with a name
    has one of that name in it.

    `now` names a new folder. `find` is called with the folder of a run before it continues there,
    or with None before a folder is made or moved aside; if it raises, nothing has changed. Without
    `--output-dir`
    and `wait` a busy folder is skipped. With `evict` a folder of `--output-dir` is taken from the
    process that has it. Raises Busy and UsageError.
    """
    try:
        if config.run.output_dir:
            return _claim_named(config.run.output_dir / name, config, find, evict=evict)
        return _claim_own(config, now, find, name=name, wait=wait)
    except OSError as error:
        raise UsageError(
            f"cannot use the output folder {error.filename or config.run.output_dir or RUNS}: "
            f"{error.strerror}; choose another with --output-dir"
        ) from None


def _claim_named(
    path: Path,
    config: Config,
    find: Find,
    *,
    evict: bool,
) -> RunFolder:
    if not (path / CONFIG).exists():
        # left by a process that was killed at its start
        early = {_LOCK, f"{CONFIG}{durable.PARTIAL_SUFFIX}"}
        if path.exists() and {entry.name for entry in path.iterdir()} - early:
            raise UsageError(
                f"--output-dir {path} is not empty and not a run of hvd_train; name another folder"
            )
        find(None)
        path.mkdir(parents=True, exist_ok=True)
        return _create(path, config)
    if config.run.resume == "auto":
        return _reopen(path, config, find, evict=evict)
    find(None)
    lock = _lock(path)  # raises Busy: a folder that is trained in is not moved away
    aside = _free_name(path.with_name(f"{path.name}.old"))
    path.rename(aside)
    lock.close()
    path.mkdir(exist_ok=True)
    return _create(path, config, f"the earlier run in {path} is now in {aside}")


def _claim_own(
    config: Config,
    now: datetime,
    find: Find,
    *,
    name: str,
    wait: bool,
) -> RunFolder:
    notes = []
    found = [
        path
        for path in sorted(RUNS.glob(f"{config.recipe}-*"), reverse=True)
        if (path / name / CONFIG).exists()
        and {path.stat().st_uid, path.lstat().st_uid} <= {0, os.geteuid()}
    ]
    for path in found:
        of_program = [*path.glob(CONFIG), *path.glob(f"*/{CONFIG}")]
        if config.run.resume != "auto" or all(
            each.with_name(SUMMARY).exists() for each in of_program
        ):
            continue
        try:
            return _reopen(path / name, config, find)
        except NoneReadable:
            raise
        except Busy:
            if wait:
                raise
            notes.append(
                f"{path} has the same settings and is being trained by another "
                "job; this is a new run"
            )
        except UsageError:
            continue  # of another config
    find(None)
    while True:
        path = _free_name(RUNS / f"{config.recipe}-{now:%Y%m%d-%H%M%S}")
        with suppress(FileExistsError):  # another process has just made it
            path.mkdir(parents=True)
            break
    (path / name).mkdir(exist_ok=True)
    return _create(path / name, config, *notes)


def _create(path: Path, config: Config, *notes: str) -> RunFolder:
    """Begin a run in a folder that had none.

    Raises Busy if another process has begun one there meanwhile.
    """
    lock = _lock(path)
    if (path / CONFIG).exists():
        lock.close()
        raise Busy(path)
    durable.write_text(path / CONFIG, config_file.dump(config))
    return RunFolder(path, notes=notes, _lock=lock)


def _reopen(path: Path, config: Config, find: Find, *, evict: bool = False) -> RunFolder:
    _check_no_links(path)
    old = config_file.load(path / CONFIG)
    before = old.schedule.epochs
    epochs = config.schedule.epochs
    notes = []
    if config.run.output_dir and epochs > before:
        # recipes give both
        old = old.replace(epochs=epochs, warmup_epochs=config.schedule.warmup_epochs)
        notes.append(f"continuing for {epochs} epochs, not {before}")
        if config.schedule.schedule in ("cosine", "linear", "one-cycle"):
            notes[0] += (
                f": the learning rate follows the schedule of {epochs} epochs from here "
                "on, not from the start"
            )
    if differences := config.differences(old):
        raise UsageError(
            f"{path} is a run with other settings ({'; '.join(differences)}): type --resume never "
            "to start again (the old run is kept aside), or name another --output-dir"
        )
    lock = _lock(path, evict=evict)
    try:
        find(path)
    except BaseException:
        lock.close()
        raise
    if notes:
        (path / SUMMARY).unlink(missing_ok=True)  # of a finished run
    text = config_file.dump(config)
    # settings that may change on resume
    if plain_file.read_text(path / CONFIG, config_file.MOST_BYTES) != text:
        durable.write_text(path / CONFIG, text)
    return RunFolder(path, earlier=True, notes=tuple(notes), _lock=lock)


def _lock(path: Path, *, evict: bool = False) -> IO[str]:
    """Lock the folder.

    Raises Busy if another process has locked it, unless it is to `evict` that process.
    """
    for _ in range(_TRIES):
        # until the process ends
        lock = open(path / _LOCK, "a", opener=plain_file.in_place)  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            if not evict:
                raise Busy(path) from None
            return _replace_lock(path)
        except OSError:
            # the file system has no locks: continue without one, if it can be written
            os.utime(path / _LOCK)
            return lock
        if _is_lock_of(path, lock):
            return lock
        lock.close()  # another process has moved the folder aside or replaced its lock meanwhile
    raise Busy(path)


def _replace_lock(path: Path) -> IO[str]:
    """Put a lock file that is locked already in place of the one that an evicted process holds."""
    new = path / f"{_LOCK}-{secrets.token_hex(8)}"
    lock = open(new, "x")  # noqa: SIM115  # until the process ends
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.replace(new, path / _LOCK)
    return lock


def _is_lock_of(path: Path, lock: IO[str]) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.stat(path / _LOCK), os.fstat(lock.fileno()))
    return False


def _check_no_links(path: Path) -> None:
    """Raise UsageError if a run folder holds a symlink or a device: writes would go elsewhere."""
    for entry in sorted((*path.iterdir(), *path.glob("checkpoints/*"))):
        try:
            status = entry.lstat()
        except FileNotFoundError:  # an earlier rank 0 has just renamed its partial file
            continue
        is_link = entry.name in _WRITTEN_IN_PLACE and status.st_nlink > 1
        if is_link or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise UsageError(
                f"{entry} is a symlink or a device: remove it, or name another --output-dir"
            )


def _free_name(path: Path) -> Path:
    others = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(each for each in chain([path], others) if not os.path.lexists(each))

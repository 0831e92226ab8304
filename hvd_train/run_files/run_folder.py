"""Run folders: which one a command means, whom it belongs to, and that no two processes write into one."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from hvd_train import config as configs
from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.run_files import durable

RUNS = Path("runs")
CONFIG, SUMMARY, METRICS, ENVIRONMENT = "config.yaml", "summary.json", "metrics.jsonl", "environment.json"
_LOCK = ".lock"


class Busy(UsageError):
    """Another process trains in the folder."""


@dataclass(frozen=True)
class RunFolder:
    """A claimed folder; the claim ends with the process. `earlier`: it holds an earlier life of this run."""

    path: Path
    earlier: bool
    notes: tuple[str, ...]
    _lock: IO[str]

    def held(self) -> bool:
        """Whether the folder is still this process's: a job that has given it up has taken the folder back."""
        try:
            return os.stat(self.path / _LOCK).st_ino == os.fstat(self._lock.fileno()).st_ino
        except OSError:
            return False

    def release(self) -> None:
        """Give up the claim: another run in this process may take the folder."""
        self._lock.close()


def take_over(path: Path) -> None:
    """Take the claim from a process that the job has given up, but which may still be there (stopped, or cut off)."""
    fresh = path / f"{_LOCK}-{os.getpid()}"
    fresh.touch()
    os.replace(fresh, path / _LOCK)


def in_use(path: Path) -> bool:
    """Whether a process of this machine trains in the folder; its lock is looked at, not tried."""
    try:
        inode = (path / _LOCK).stat().st_ino
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    return any(" FLOCK " in line and f":{inode} " in line for line in lines)


def claim(config: Config, now: datetime) -> RunFolder:
    """Choose, create and lock the folder of this run, and write its config.yaml.

    Raises UsageError where the folder belongs to another config, another process or something else entirely.
    """
    try:
        return _claim_named(config.run.output_dir, config) if config.run.output_dir else _claim_own(config, now)
    except OSError as error:
        raise UsageError(
            f"cannot use the output folder {error.filename or config.run.output_dir or RUNS}: {error.strerror}; "
            "choose another with --output-dir"
        ) from None


def _claim_named(path: Path, config: Config) -> RunFolder:
    if path.exists() and not path.is_dir():
        raise UsageError(f"--output-dir {path} is a file; name a folder")
    if not (path / CONFIG).exists():
        # A process that was killed right after it had made the folder leaves its lock, and nothing of the user's.
        if path.exists() and any(
            entry.name not in (_LOCK, f"{CONFIG}{durable.PARTIAL_SUFFIX}") for entry in path.iterdir()
        ):
            raise UsageError(f"--output-dir {path} is not empty and not a run of hvd_train; name another folder")
        return _create(path, config)
    if config.run.resume == "auto":
        return _reopen(path, config)
    lock = _lock(path)  # raises where another process is at work in it
    aside = _free_name(path.with_name(f"{path.name}.old"))
    path.rename(aside)
    lock.close()
    return _create(path, config, f"the earlier run in {path} is now in {aside}")


def _claim_own(config: Config, now: datetime) -> RunFolder:
    if config.run.resume == "auto":
        for path in sorted(RUNS.glob(f"{config.recipe}-*"), reverse=True):
            if (path / CONFIG).exists() and not (path / SUMMARY).exists():
                try:
                    return _reopen(path, config)
                except UsageError:
                    continue  # of another config, or being trained right now
    return _create(_free_name(RUNS / f"{config.recipe}-{now:%Y%m%d-%H%M%S}"), config)


def _create(path: Path, config: Config, *notes: str) -> RunFolder:
    path.mkdir(parents=True, exist_ok=True)
    lock = _lock(path)
    durable.write_text(path / CONFIG, configs.dump(config))
    return RunFolder(path, earlier=False, notes=notes, _lock=lock)


def _reopen(path: Path, config: Config) -> RunFolder:
    differences = config.differences(configs.load(path / CONFIG))
    if differences:
        raise UsageError(
            f"{path} is a run with other settings ({'; '.join(differences)}): type --resume never to start anew "
            "(the old run is kept aside), or name another --output-dir"
        )
    lock = _lock(path)
    durable.write_text(path / CONFIG, configs.dump(config))
    return RunFolder(path, earlier=True, notes=(), _lock=lock)


def _lock(path: Path) -> IO[str]:
    lock = open(path / _LOCK, "w")  # noqa: SIM115  # held open for as long as the process lives
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise Busy(f"another process is training in {path}; wait for it, or name another --output-dir") from None
    except OSError:
        os.utime(path / _LOCK)  # a file system without locks: go on without one
    return lock


def _free_name(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate

"""Devices, output and commits of a run."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvd_train.errors import UsageError
from hvd_train.settings.fields import at_least, free, positive

_MOST_PROFILED_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Devices, output and commits of a run; nothing here changes the result."""

    device: Literal["auto", "cpu", "cuda"] = free("auto")
    """Device of the model; auto: a GPU per rank if there is one."""
    gpu_ids: tuple[int, ...] | None = free(None)
    """GPUs of each host, in the order of the local ranks that use them; default: 0, 1, 2, ..."""
    output_dir: Path | None = free(None)
    """Run folder; default: the stopped run of the same command, else runs/RECIPE-TIME."""
    resume: str = free("auto")
    """auto: resume from the newest good checkpoint of the run folder; never: start again; or a checkpoint file."""
    data_changed: bool = free(False)
    """Resume with changed data: the current epoch ends, and the next one uses the new data."""
    commit_steps: int | None = free(None)
    """Steps from one checkpoint to the next."""
    commit_seconds: float | None = free(60.0)
    """Write a checkpoint when the last one is this many seconds old."""
    keep_checkpoints: int = free(3)
    """Number of the newest checkpoints to keep."""
    log_steps: int = free(10)
    """Steps from one line of metrics to the next."""
    log_dir: Path | None = free(None)
    """Also write the output of each rank to a file of its own in this folder."""
    progress: Literal["auto", "bar", "lines"] = free("auto")
    """A live bar or plain lines; auto: a bar for one process at a terminal (launchers forward lines)."""
    max_time: str | None = free(None)
    """Commit and stop after this time, as in 2h30m, 90m or 45s; the same command resumes from there."""
    ledger: bool = free(False)
    """Write the samples of each step to ledger.jsonl, for `hvd-train audit`."""
    eval_epochs: int = free(1)
    """Epochs from one evaluation to the next (the last epoch is always evaluated)."""
    profile: str | None = free(None)
    """Trace these steps on all ranks, into one file of the run folder: 20, or 20:25 (both included)."""

    def __post_init__(self) -> None:
        if len(set(self.gpu_ids or ())) < len(self.gpu_ids or ()):
            raise UsageError("--gpu-ids names a GPU twice: each rank has one of its own")
        at_least("commit-steps", self.commit_steps, 1)
        positive("commit-seconds", self.commit_seconds)
        at_least("keep-checkpoints", self.keep_checkpoints, 1)
        at_least("log-steps", self.log_steps, 1)
        at_least("eval-epochs", self.eval_epochs, 1)
        _ = self.max_seconds, self.profiled_steps  # may raise

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds, or None. Raises UsageError if it is no time."""
        if self.max_time is None:
            return None
        match = re.fullmatch(r"(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?", self.max_time)
        if not match or not any(match.groups()):
            raise UsageError(f"--max-time {self.max_time}: write it as in 2h30m, 90m or 45s")
        hours, minutes, seconds = (float(part or 0) for part in match.groups())
        return hours * 3600 + minutes * 60 + seconds

    @property
    def profiled_steps(self) -> range:
        """Numbers of the steps to trace, from 1; empty without `profile`. Raises UsageError if it names no steps."""
        if self.profile is None:
            return range(0)
        match = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,18}))?", self.profile)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise UsageError(f"--profile {self.profile}: write steps as in 20 or 20:25; the first step is 1")
        if last - first >= _MOST_PROFILED_STEPS:
            raise UsageError(f"--profile {self.profile}: at most {_MOST_PROFILED_STEPS} steps, since a trace is large")
        return range(first, last + 1)

"""Where a run takes place, what it leaves behind and how often."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvd_train import remote_url
from hvd_train.errors import UsageError, unknown_name
from hvd_train.numerals import whole_number
from hvd_train.settings.fields import at_least, free, is_none, positive, seconds_in, to_paths

DESTINATIONS = ("tensorboard", "wandb", "mlflow", "csv")
"""Where the numbers of a run can go."""
_MOST_PROFILED_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run takes place, what it leaves behind and how often; nothing here changes the result."""

    device: Literal["auto", "cpu", "cuda"] = free("auto")
    """Where the model lives; auto: a GPU per rank where there is one."""
    gpu_ids: tuple[int, ...] | None = free(None)
    """GPUs of each host, in the order of the local ranks that use them; default: 0, 1, 2, ..."""
    output_dir: Path | None = free(None)
    """Run folder; default: that of an earlier run which was stopped, of the same command or one with fewer epochs, else
    runs/RECIPE-TIME. A URL, as s3://BUCKET/RUN, has its commits copied there."""
    resume: str = free("auto")
    """auto: go on from the newest good checkpoint of the run folder; never: start anew; or a run folder to go on in
    (without a recipe, with its settings), or a checkpoint file to start a new run from."""
    commit_steps: int | None = free(None)
    """Steps from one checkpoint to the next."""
    commit_seconds: float | None = free(60.0)
    """Write a checkpoint when the last one is this many seconds old."""
    check_seconds: float | None = free(60.0)
    """Compare the weights of all ranks, and all else that must be equal, when the last comparison is this many seconds
    old; it is compared before each checkpoint in any case, and in between for at most 0.5% of the time."""
    recheck_steps: str = free("auto")
    """Have all ranks compute one and the same slot again after so many steps, and compare its gradients; auto: for at
    most 0.5% of the time, also before checkpoints; none (or 0): never."""
    keep_checkpoints: int = free(3)
    """How many of the newest checkpoints stay on disk."""
    weights_format: Literal["pt", "safetensors"] = free("pt")
    """Format of the files model-best and model-final: a plain state_dict of torch.save, or safetensors."""
    log_steps: int = free(10)
    """Steps from one line of metrics to the next."""
    log_to: tuple[str, ...] = free(("tensorboard",))
    """Where numbers go besides metrics.jsonl: any of tensorboard, wandb, mlflow and csv, or none."""
    log_dir: Path | None = free(None)
    """Also keep what each rank prints, in a file of its own in this folder."""
    progress: Literal["auto", "bar", "lines"] = free("auto")
    """A live bar or plain lines; auto: a bar for one process at a terminal (launchers forward lines)."""
    timestamps: bool = free(False)
    """Begin each line with the date and the time of day, for the log of a long run (a bar has none)."""
    max_time: str | None = free(None)
    """Commit and stop this long after the start, as in 2h30m, 1.5h or 90m; a number alone is seconds. The files of the
    end are written, and the same command goes on from there; `total-time` ends a run for good."""
    shared_weights: Literal["auto", "on", "off"] = free("auto")
    """Keep weights and optimizer state once for all ranks of a host, in memory that they share, where the ranks are on
    CPUs of one host; auto: unless the model is so small that it does not pay."""
    ledger: bool = free(False)
    """Write what each step took to ledger.jsonl, for `hvd-train audit`."""
    eval_epochs: int = free(1)
    """Epochs from one evaluation to the next (the last epoch is always evaluated)."""
    tuned: Path | None = free(None)
    """Take Horovod's settings from this file, which `hvd-train tune` has written."""
    profile: str | None = free(None)
    """Trace these steps on all ranks, into one file of the run folder: 20, or 20:25 (both included)."""

    def __post_init__(self) -> None:
        to_paths(self, "output_dir", "log_dir", "tuned")
        if len(set(self.gpu_ids or ())) < len(self.gpu_ids or ()):
            raise UsageError("--gpu-ids names a GPU twice: each rank has one of its own")
        at_least("commit-steps", self.commit_steps, 1)
        positive("commit-seconds", self.commit_seconds)
        positive("check-seconds", self.check_seconds)
        object.__setattr__(self, "recheck_steps", _recheck_steps(self.recheck_steps))  # it is frozen, and being made
        at_least("keep-checkpoints", self.keep_checkpoints, 1)
        at_least("log-steps", self.log_steps, 1)
        at_least("eval-epochs", self.eval_epochs, 1)
        for folder in (self.output_dir, self.resume):
            if folder is not None and (url := remote_url.url_of(folder)):
                remote_url.check(url, "--output-dir" if folder is self.output_dir else "--resume")
        object.__setattr__(self, "log_to", _destinations(self.log_to))  # the config is frozen, and being made
        _ = self.max_seconds, self.profiled_steps  # raise for what is not a time, or not steps

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds; None where there is no limit. Raises UsageError for what is not a time."""
        return seconds_in("max-time", self.max_time)

    @property
    def rechecked_every(self) -> int | None:
        """The steps from one recheck to the next; None where the setting names no number."""
        return whole_number(self.recheck_steps)

    @property
    def profiled_steps(self) -> range:
        """The numbers of the steps to trace, counted from 1; empty without `profile`. Raises UsageError for others."""
        if self.profile is None:
            return range(0)
        match = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,18}))?", self.profile)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise UsageError(f"--profile {self.profile}: write steps as in 20 or 20:25; the first step is 1")
        if last - first >= _MOST_PROFILED_STEPS:
            raise UsageError(f"--profile {self.profile}: at most {_MOST_PROFILED_STEPS} steps, since a trace is large")
        return range(first, last + 1)


def _recheck_steps(value: str | int) -> str:
    """Return the setting as text: auto, none or a number above 0. Raises UsageError for anything else."""
    text = str(value).lower()
    if text in ("auto", "none", "0"):
        return "none" if text == "0" else text
    if not whole_number(text):
        raise UsageError(f"--recheck-steps {value}: write a number of steps, auto or none")
    return text


def _destinations(values: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in `values`, each once and in small letters; several may stand in one, with commas between them.

    `none` alone stands for no name. Raises UsageError for other names.
    """
    texts = (values,) if isinstance(values, str) else values
    names = tuple(dict.fromkeys(name.strip().lower() for text in texts for name in text.split(",") if name.strip()))
    if len(names) == 1 and is_none(names[0]):
        return ()
    for name in names:
        if is_none(name):
            raise UsageError("--log-to has none and others: name destinations, or none alone")
        if name not in DESTINATIONS:
            raise unknown_name("destination of --log-to", name, DESTINATIONS)
    return names

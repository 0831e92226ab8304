"""Runs of a script, and what differs between two of them."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_train import checkpoint, config_file
from hvd_train.batches import REVERSED
from hvd_train.config import Config
from hvd_train.console import reasons, say
from hvd_train.data.trees import parts_of
from hvd_train.elastic.roster import FIRST_NUMBER
from hvd_train.errors import UsageError
from hvd_train.launch import workers
from hvd_train.run_files import history, ledger, run_folder
from hvd_train.state import TENSORS

Act = Callable[[subprocess.Popen[bytes]], None]
IN_ANOTHER_ORDER = {REVERSED: "1", "OMP_NUM_THREADS": "1"}
"""Variables of a run that adds up the same numbers in another order."""
_MAY_DIFFER = {
    "kind",
    "time",
    "samples_per_second",
    "seconds",
    "total_seconds",
    "peak_memory_gib",
    "gpu",
    "split",
    "ranks",
}
_ROUNDING = 10.0  # a difference by rounding is less than this many times another one
_RAISED = re.compile(
    r"^(?:\[[\d,]+\]<\w+>: ?)?((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$", re.MULTILINE
)
_CONSEQUENCE = re.compile(
    "another rank ended|ended with exit code|see above|waiting for |is evicted"
)


class Run:
    """A run of the script; it may have several trainings, each with a folder."""

    def __init__(
        self, folder: Path, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self._log = folder.with_suffix(".log")
        self._variables = variables or {}
        self._command = [*command, "--output-dir", str(folder), "--log-steps", "1", "--ledger"]

    def complete(self, disturb_after: int = 0, disturb: Act | None = None) -> str | None:
        """Run the script to its end, again if it stops; return why it failed, or None.

        `disturb` acts once on its process, after so many steps.
        """
        act = disturb
        for attempt in itertools.count():
            begin = self._log.stat().st_size if self._log.exists() else 0
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._variables},
                )
            try:
                while process.poll() is None:
                    if disturb is not None and self.num_steps >= disturb_after:
                        disturb(process)
                        disturb = None
                    time.sleep(0.05)
            finally:
                process.terminate()  # after Ctrl-C; else it has ended
            if process.returncode == 0:
                if disturb is not None or (act is subprocess.Popen.terminate and attempt == 0):
                    say(
                        f"{self.folder.name}: the script ended before it could be disturbed: "
                        "let it take more steps"
                    )
                return None
            if process.returncode not in (-signal.SIGTERM, 128 + signal.SIGTERM):
                text = self._log.read_bytes()[begin:].decode(errors="replace")
                return (
                    f"the script ended with exit code {process.returncode}: "
                    f"{cause(text)} (see {self._log})"
                )
        raise AssertionError

    @property
    def trainings(self) -> list[str]:
        """The names of its trainings so far; one without a name has its
        files in the folder itself.
        """
        found = [*self.folder.glob(run_folder.CONFIG), *self.folder.glob(f"*/{run_folder.CONFIG}")]
        return sorted(str(path.parent.relative_to(self.folder)) for path in found)

    def records(self, training: str) -> list[dict[str, Any]]:
        """Return the records of a training so far."""
        found = history.lines(self.folder / training / run_folder.METRICS)
        return [record for _, record in found]

    def steps(self, training: str) -> dict[int, dict[str, Any]]:
        """Return the records of the steps of a training so far, without what may differ."""
        steps = [record for record in self.records(training) if record["kind"] == "step"]
        return {
            step["step"]: {name: value for name, value in step.items() if name not in _MAY_DIFFER}
            for step in steps
        }

    @property
    def configs(self) -> list[Config]:
        """The settings of its trainings so far."""
        paths = [self.folder / training / run_folder.CONFIG for training in self.trainings]
        return [*map(config_file.load, paths)]

    @property
    def is_exact(self) -> bool:
        """Whether all its trainings add gradients exactly."""
        return all(config.precision.is_exact for config in self.configs)

    def check_settings(self, ranks: int) -> None:
        """Raise UsageError if results depend on the number of ranks by a setting."""
        for config in self.configs:
            batch = config.batch
            if batch.global_batch_size is None:
                size = (batch.batch_size or 1) * batch.accumulation_steps * ranks
                leave = "" if batch.on_resize == "global" else "leave out --on-resize, and "
                raise UsageError(
                    "the global batch follows the number of ranks, so results differ: "
                    f"{leave}add --global-batch-size {size}"
                )
            if config.model.sync_batch_norm:
                raise UsageError(
                    "batch norm over all ranks depends on their number, so results differ: leave "
                    "out --sync-batch-norm"
                )

    @property
    def num_steps(self) -> int:
        """The number of steps of all trainings so far."""
        return sum(len(self.steps(training)) for training in self.trainings)

    @property
    def newcomers(self) -> int:
        """The number of workers that have joined a training."""
        records = [record for training in self.trainings for record in self.records(training)]
        return sum(len(record["came"]) for record in records if record.get("name") == "world")


def cause(output: str) -> str:
    """Return the error in the output of a failed run: the first one that was raised,
    else the last line about one.
    """
    if raised := _RAISED.search(output):
        return raised[1]
    lines = reasons(output)
    causes = (
        [line for line in lines if not _CONSEQUENCE.search(line)] or lines or output.splitlines()
    )
    return causes[-1] if causes else "it printed nothing"


def kill_a_worker(driver: subprocess.Popen[bytes]) -> None:
    """Kill the second worker of an elastic job."""
    for worker in workers.started_with({workers.WORKER: str(FIRST_NUMBER + 1)}):
        if any(parent.pid == driver.pid for parent in worker.parents()):
            worker.kill()


def differences(
    alone: Run, other: Run, tolerance: float, control: Run | None = None
) -> tuple[list[str], str]:
    """Return what differs between two runs: samples, the first step, registered values, the
    first tensor; and a note.

    The note is of numbers that differ by rounding. A difference is rounding if it is below the
    tolerance, or not much larger than between `alone` and `control`, a run in another order.
    """
    found = []
    note = ""
    for training in alone.trainings:
        of = "" if training == "." else f"{training}: "
        if training not in other.trainings:
            found.append(f"there is no training {training}")
            continue
        found += [
            f"{of}NOT exact: {fault}" for fault in ledger.audit(other.folder / training).faults[:1]
        ]
        found += [
            f"{of}{what}"
            for what in _steps_that_differ(alone, other, training, tolerance, control)[:1]
        ]
        runs = (_parts(run, training) for run in (alone, other, control or alone))
        for name, (mine, its, again) in zip(
            ("registered value", "tensor"), zip(*runs, strict=True), strict=True
        ):
            if what := _first_difference(mine, its, tolerance, _noise(mine, again)):
                found.append(f"{of}the first {name} that differs is {what}")
            elif rounded := _first_difference(mine, its, tolerance):
                note = (
                    note
                    or f"{of}{rounded}, as between two orders of addition; what the "
                    "steps compute is the same"
                )
    return found, note


def _parts(run: Run, training: str) -> tuple[Any, Any]:
    """Return the registered values and the tensors at the end of a training."""
    if (snapshot := checkpoint.newest_good(run.folder / training, say)) is None:
        raise UsageError(f"{run.folder / training} has no checkpoint")
    return snapshot["point"]["own"], {name: snapshot[name] for name in TENSORS}


def _steps_that_differ(
    alone: Run, other: Run, training: str, tolerance: float, control: Run | None
) -> list[str]:
    mine = alone.steps(training)
    its = other.steps(training)
    again = control.steps(training) if control is not None else mine
    noise = dict[str, float]()
    found = []
    if mine.keys() != its.keys():
        found.append(f"it took {len(its)} steps, not {len(mine)}")
    for number, one in mine.items():
        for name, value in _noise(one, again.get(number, one)).items():
            noise[name] = max(value, noise.get(name, 0.0))  # rounding grows
        if what := _first_difference(one, its.get(number, one), tolerance, noise):
            found.append(f"step {number} is the first that differs, in {what}")
    return found


def depends_on_order(alone: Run, control: Run, tolerance: float) -> str:
    """Return how the first step differs in another order of its micro-batches, where
    rounding has not grown yet.
    """
    for training in alone.trainings:
        if what := next(iter(_steps_that_differ(alone, control, training, tolerance, None)), ""):
            first = min(alone.steps(training))
            return what if f"step {first} is" in what else ""
    return ""


def _noise(one: Any, two: Any) -> dict[str, float]:
    """Return how much each number in two nested values differs, by its path."""
    others = leaves(two)
    gaps = {path: gap_between(value, others.get(path)) for path, value in leaves(one).items()}
    return {
        path: float(gap.nan_to_num(0.0, 0.0).max())
        for path, gap in gaps.items()
        if gap is not None and len(gap)
    }


def _first_difference(
    one: Any, two: Any, tolerance: float, noise: Mapping[str, float] | None = None
) -> str:
    """Return the path of the first value that differs, and by how much;
    numbers may differ by rounding.

    `noise` has, for each number, how much it differs in another order of addition.
    """
    mine = leaves(one)
    its = leaves(two)
    for path in {**mine, **its}:
        value = mine.get(path)
        other = its.get(path)
        gap = gap_between(value, other)
        if gap is None:
            if isinstance(value, Tensor) or isinstance(other, Tensor) or value != other:
                return path
            continue
        sizes = torch.as_tensor(value, dtype=torch.float64).abs()
        # a mask may have infinities
        largest = float(torch.cat([sizes[sizes.isfinite()], torch.ones(1)]).max())
        of_noise = _ROUNDING * noise.get(path, 0.0) if noise and tolerance else 0.0
        if not (gap <= max(tolerance * largest, of_noise)).all():
            return f"{path}, by {float(gap.max()):.2g}"
    return ""


def leaves(values: Any, path: str = "") -> dict[str, Any]:
    """Return what nested mappings and sequences hold, by path."""
    parts = parts_of(values)
    if parts is None:
        return {path: values}
    found = dict[str, Any]()
    for key, value in parts:
        found |= leaves(value, f"{path}/{key}" if path else str(key))
    return found


def gap_between(one: Any, two: Any) -> Tensor | None:
    """Return by how much two numbers, or tensors of one shape, differ, as a
    row; None for other values.
    """
    if not all(isinstance(value, (float, Tensor)) for value in (one, two)):
        return None
    mine: Tensor = torch.as_tensor(one, dtype=torch.float64)
    its: Tensor = torch.as_tensor(two, dtype=torch.float64)
    if mine.shape != its.shape:
        return None
    same = (mine == its) | (mine.isnan() & its.isnan())  # infinities, too
    return (mine - its).abs().masked_fill(same, 0.0).flatten()

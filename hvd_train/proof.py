"""Runs of a script, and what differs between two of them."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hvd_train import checkpoint, plain_file
from hvd_train.console import say
from hvd_train.elastic.roster import FIRST_NUMBER
from hvd_train.errors import UsageError
from hvd_train.launch import launcher
from hvd_train.run_files import ledger, run_folder
from hvd_train.state import TENSORS

Act = Callable[[subprocess.Popen[bytes]], None]
_MAY_DIFFER = {"kind", "time", "samples_per_second", "seconds", "total_seconds", "peak_memory_gib", "gpu", "split"}


class Run:
    """A run of the script."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.folder, self._log = folder, folder.with_suffix(".log")
        self._command = [*command, "--output-dir", str(folder), "--log-steps", "1", "--ledger"]

    def complete(self, disturb_after: int = 0, disturb: Act | None = None) -> str | None:
        """Run the script to its end, again if it stops; return why it failed, or None.

        `disturb` acts once on its process, after so many steps.
        """
        while True:
            with self._log.open("ab") as log:
                process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                while process.poll() is None:
                    if disturb is not None and len(self.steps) >= disturb_after:
                        act, disturb = disturb, None
                        act(process)
                    time.sleep(0.05)
            finally:
                process.terminate()  # after Ctrl-C; else it has ended
            if process.returncode == 0:
                if disturb is not None:
                    say(f"{self.folder.name}: the script ended before it could be disturbed: let it take more steps")
                return None
            if process.returncode not in (-signal.SIGTERM, 128 + signal.SIGTERM):
                text = self._log.read_text(errors="replace")
                lines = launcher.reasons(text) or text.splitlines()
                reason = lines[0] if lines else "it printed nothing"
                return f"the script ended with exit code {process.returncode}: {reason} (see {self._log})"

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The records of its steps so far, without what may differ."""
        path = self.folder / run_folder.METRICS
        whole = plain_file.read_text(path).rpartition("\n")[0] if path.exists() else ""
        records = [record for record in map(json.loads, whole.splitlines()) if record["kind"] == "step"]
        return [{name: record[name] for name in record if name not in _MAY_DIFFER} for record in records]


def kill_a_worker(driver: subprocess.Popen[bytes]) -> None:
    """Kill the second worker of an elastic job."""
    for worker in launcher.started_with({launcher.WORKER: str(FIRST_NUMBER + 1)}):
        if any(parent.pid == driver.pid for parent in worker.parents()):
            worker.kill()


def differences(alone: Run, other: Run, tolerance: float) -> list[str]:
    """Return what differs between two runs: samples, the first step, registered values, the first tensor."""
    found = [f"NOT exact: {fault}" for fault in ledger.audit(other.folder).faults[:1]]
    for one, two in zip(alone.steps, other.steps, strict=False):
        if what := _first_difference(one, two, tolerance):
            found.append(f"step {one['step']} is the first that differs, in {what}")
            break
    mine, its = (checkpoint.newest_good(run.folder, say) for run in (alone, other))
    if mine is None or its is None:
        raise UsageError(f"{(other if mine else alone).folder} has no checkpoint")
    if what := _first_difference(mine["point"]["own"], its["point"]["own"], tolerance):
        found.append(f"the first registered value that differs is {what}")
    for name in TENSORS:
        if what := _first_difference({name: mine[name]}, {name: its[name]}, tolerance):
            found.append(f"the first tensor that differs is {what}")
            break
    return found


def _first_difference(one: Any, two: Any, tolerance: float, name: str = "") -> str:
    """Return the name of the first value that differs, and by how much; numbers may differ by the tolerance."""
    if isinstance(one, float) and isinstance(two, float):
        one, two = torch.tensor(one, dtype=torch.float64), torch.tensor(two, dtype=torch.float64)
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and one.shape == two.shape:
        one, two = one.double(), two.double()
        finite = one[one.isfinite()]  # a mask may have infinities
        largest = max(1.0, float(finite.abs().max())) if len(finite) else 1.0
        same = torch.allclose(two, one, 0.0, tolerance * largest, equal_nan=True)
        return "" if same else f"{name[1:]}, by {float((one - two).abs().max()):.2g}"
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        one, two = dict(enumerate(one)), dict(enumerate(two))
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        parts = (_first_difference(one.get(key), two.get(key), tolerance, f"{name}/{key}") for key in {**one, **two})
        return next(filter(None, parts), "")
    same = not isinstance(one, torch.Tensor) and not isinstance(two, torch.Tensor) and one == two
    return "" if same else name[1:]

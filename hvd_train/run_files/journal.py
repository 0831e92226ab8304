"""The journal of a run: what it reports goes to the console, metrics.jsonl, the ledger and where `--log-to` says.

Rank 0 keeps it; all other ranks have a `SilentJournal`, so that training never asks who writes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from typing_extensions import override

from hvd_train.elastic.members import Change
from hvd_train.progress.clock import PHASES
from hvd_train.run_files import destinations
from hvd_train.run_files.appended_file import AppendedFile
from hvd_train.run_files.display import Display, LineDisplay, TerminalDisplay
from hvd_train.run_files.durable import Permission, always
from hvd_train.run_files.ledger import Entry
from hvd_train.run_files.ledger_file import LedgerFile
from hvd_train.run_files.records import (
    NOT_PLOTTED,
    OF_RANKS,
    OF_WORLD,
    Ending,
    EpochRecord,
    Moment,
    Plan,
    StepRecord,
    numbers_of,
)
from hvd_train.run_files.rewind import Mark, forget_after
from hvd_train.run_files.run_folder import METRICS


class Journal(Protocol):
    """Records what happens in a training."""

    def begin(self, plan: Plan) -> None:
        """Training starts, or goes on, and is to do this."""

    def catch_up(self, recent: Sequence[Entry], last_step: StepRecord | None, last_epoch: EpochRecord | None) -> None:
        """Write what the state of the training holds and the files lack.

        The rank that kept the journal before may have been lost, and this one may have missed the end of a step.
        """

    def progress(self, moment: Moment) -> None:
        """Show how far training is; called after every step, and written nowhere."""

    def step(self, record: StepRecord) -> None:
        """Write the metrics of a step; the config says which steps have a record."""

    def epoch(self, record: EpochRecord) -> None:
        """Write the metrics of an epoch that has just ended."""

    def world(self, change: Change, step: int, seconds: float) -> None:
        """Report a change of world after the first step in the new one.

        `step`: the number of that step; `seconds`: the time from the fault, or the wish to change, to its end.
        """

    def took(self, entry: Entry) -> None:
        """Write which samples finished steps took, where the run keeps a ledger: one more step has joined the entry."""

    def event(self, name: str, message: str, **facts: Any) -> None:
        """Show a message to the user, and write it with machine-readable facts under a name for its kind."""

    def end(self, ending: Ending) -> None:
        """Take how the training has ended, for where its numbers go; without it, it goes on in another process."""

    def close(self) -> None:
        """Close the files; nothing is reported after this. The ledger is complete up to the last step then."""


class SilentJournal(Journal):
    """Discards everything, on ranks that do not write."""

    @override
    def begin(self, plan: Plan) -> None:
        pass

    @override
    def catch_up(self, recent: Sequence[Entry], last_step: StepRecord | None, last_epoch: EpochRecord | None) -> None:
        pass

    @override
    def progress(self, moment: Moment) -> None:
        pass

    @override
    def step(self, record: StepRecord) -> None:
        pass

    @override
    def epoch(self, record: EpochRecord) -> None:
        pass

    @override
    def world(self, change: Change, step: int, seconds: float) -> None:
        pass

    @override
    def took(self, entry: Entry) -> None:
        pass

    @override
    def event(self, name: str, message: str, **facts: Any) -> None:
        pass

    @override
    def end(self, ending: Ending) -> None:
        pass

    @override
    def close(self) -> None:
        pass


class RunJournal(Journal):
    """Writes the files of a run folder and shows progress. What a full disk does not take is written when it fits."""

    def __init__(
        self,
        folder: Path,
        resumed_step: int,
        epochs_done: int,
        *,
        live: bool,
        timestamps: bool = False,
        ledger: bool = False,
        permission: Permission = always,
        log_to: Sequence[str] = ("tensorboard",),
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Open the files of `folder`. A bar is shown where `live`, else lines, with the time of day where `timestamps`.

        A ledger is kept where `ledger`. The run goes on after step `resumed_step`, with `epochs_done` epochs finished:
        whatever the files hold beyond that did not happen and is removed. Nothing is written where `permission`, which
        is asked for each line, says no. Numbers go to the destinations in `log_to`, which are told the `settings` of
        the run. Raises OSError where the files cannot be read, and UsageError where they are none of a run.
        """
        self._display: Display = TerminalDisplay() if live else LineDisplay(timestamps=timestamps)
        report, path = self._display.say, folder / METRICS
        self._last_step, self._last_epoch = _forget_after(path, resumed_step, epochs_done)
        self._lines = AppendedFile(path, report, permission)
        facts = destinations.Facts(folder, resumed_step, epochs_done, settings, report, permission)
        self._destinations = [destinations.opened(name, facts) for name in log_to]
        self._ending: Ending | None = None
        self._ledger = LedgerFile(folder, resumed_step, report, permission) if ledger else None

    @override
    def begin(self, plan: Plan) -> None:
        self._display.begin(plan)
        for destination in self._destinations:
            destination.begin(_names_of_numbers(plan.figures))

    @override
    def catch_up(self, recent: Sequence[Entry], last_step: StepRecord | None, last_epoch: EpochRecord | None) -> None:
        for entry in recent:
            self.took(entry)
        if last_step is not None and last_step.step > self._last_step:
            self.step(last_step)
        if last_epoch is not None and last_epoch.epoch > self._last_epoch:
            self.epoch(last_epoch)

    @override
    def progress(self, moment: Moment) -> None:
        self._display.progress(moment)

    @override
    def step(self, record: StepRecord) -> None:
        self._last_step = record.step
        self._write("step", record.line())

    @override
    def epoch(self, record: EpochRecord) -> None:
        self._last_epoch = record.epoch
        if self._ledger is not None:
            self._ledger.sync()
        self._write("epoch", record.line())
        self._display.epoch(record)

    @override
    def world(self, change: Change, step: int, seconds: float) -> None:
        self.event(
            "world",
            change.describe(seconds),
            step=step,
            world_size=len(change.after),
            previous_size=len(change.before),
            left=[str(member) for member in change.left],
            came=[str(member) for member in change.came],
            why=change.reason,
            seconds=round(seconds, 3),
            steps_lost=change.steps_lost,
        )

    @override
    def took(self, entry: Entry) -> None:
        if self._ledger is not None:
            self._ledger.took(entry)

    @override
    def event(self, name: str, message: str, **facts: Any) -> None:
        self._display.say(message)
        self._write("event", {"name": name, "message": message, **facts})

    @override
    def end(self, ending: Ending) -> None:
        self._ending = ending

    @override
    def close(self) -> None:
        self._lines.close()
        if self._ledger is not None:
            self._ledger.close()
        for destination in self._destinations:
            destination.close(self._ending)
        self._display.close()

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        line = {"kind": kind, "time": round(time.time(), 3), **values}
        # JSON has no NaN and no infinity: strict readers refuse what json.dumps would write for them.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self._lines.write((json.dumps(finite) + "\n").encode())
        numbers = numbers_of(line)
        if numbers is not None:
            for destination in self._destinations:
                destination.add(numbers)


def _names_of_numbers(figures: Sequence[str]) -> list[str]:
    """Return the names that the numbers of a run can have, whose task measures these figures."""
    of_steps = [field.name for field in fields(StepRecord) if field.name not in {*NOT_PLOTTED, "scores"}]
    return [
        *(f"train/{name}" for name in (*figures, *of_steps)),
        *(f"seconds/{phase}" for phase in PHASES),
        *(f"val/{name}" for name in figures),
        *OF_RANKS,
        *(f"usage/{name}" for name in ("peak_memory", "peak_gpu_memory", "gpu_utilization", "gpu_watts")),
        *OF_WORLD,
    ]


def _forget_after(path: Path, step: int, epochs_done: int) -> tuple[int, int]:
    """Remove from metrics.jsonl what comes after `step`, as `rewind.forget_after` does."""
    return forget_after(path, step, epochs_done, _mark_of)


def _mark_of(line: bytes) -> Mark | None:
    try:
        record = json.loads(line)
        return Mark(record["kind"], int(record.get("step", 0)), int(record.get("epoch", 0)))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None

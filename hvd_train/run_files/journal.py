"""The journal of a run: everything it reports goes to the console, metrics.jsonl, TensorBoard and the ledger.

Rank 0 keeps it; all other ranks have a `SilentJournal`, so that training never asks who writes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from hvd_train.elastic.members import Change
from hvd_train.plain_file import in_place
from hvd_train.run_files.display import Display, LineDisplay, TerminalDisplay
from hvd_train.run_files.ledger import Entry
from hvd_train.run_files.ledger_file import LedgerFile
from hvd_train.run_files.records import EpochRecord, Moment, StepRecord
from hvd_train.run_files.run_folder import METRICS, RunFolder
from hvd_train.run_files.tail import lines_backwards


class Journal(Protocol):
    """Records what happens in a training."""

    def begin(self, epochs: int, samples_per_epoch: int) -> None:
        """Training starts and is to take this many epochs of this many samples."""

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

    def close(self) -> None:
        """Close the files; nothing is reported after this. The ledger is complete up to the last step then."""


class SilentJournal(Journal):
    """Discards everything, on ranks that do not write."""

    @override
    def begin(self, epochs: int, samples_per_epoch: int) -> None:
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
    def close(self) -> None:
        pass


class RunJournal(Journal):
    """Writes the files of a run folder and shows progress. What a full disk does not take is written when it fits."""

    def __init__(
        self,
        folder: RunFolder,
        resumed_step: int,
        epochs_done: int,
        *,
        live: bool,
        ledger: bool = False,
    ) -> None:
        """Open the files of `folder`; `live` shows a bar instead of lines, `ledger` keeps a ledger.

        The run resumes after step `resumed_step` and `epochs_done` whole epochs. Later entries of the files did not
        happen and are removed. Raises OSError if the files cannot be read.
        """
        from hvd_train.run_files.board import Board  # slow to import, and only one rank needs it

        self._display: Display = TerminalDisplay() if live else LineDisplay()
        report, path = self._display.say, folder.path / METRICS
        self._last_step, self._last_epoch, reached = _forget_after(path, resumed_step, epochs_done)
        self.steps_lost = max(0, reached - resumed_step)
        """The steps after `resumed_step` in the files. As not every step has a line, more may be lost."""
        self._lines = folder.append(METRICS, report)
        self._board = Board(folder, resumed_step, report)
        self._ledger = LedgerFile(folder, resumed_step, report) if ledger else None

    @override
    def begin(self, epochs: int, samples_per_epoch: int) -> None:
        self._display.begin(epochs, samples_per_epoch)

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
        self._write("step", vars(record))
        shown = {name: v for name, v in vars(record).items() if name not in ("epoch", "step", "samples", "split")}
        seconds = {f"seconds/{phase}": value for phase, value in (record.split or {}).items()}
        self._plot({f"train/{name}": value for name, value in shown.items()} | seconds, record.step)

    @override
    def epoch(self, record: EpochRecord) -> None:
        self._last_epoch = record.epoch
        if self._ledger is not None:
            self._ledger.sync()
        self._write("epoch", vars(record))
        scores = {name.replace("_", "/"): getattr(record, name) for name in ("val_loss", "val_top1", "val_top5")}
        self._plot(scores, record.step)
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
        self._plot({"world/size": len(change.after), "world/seconds_to_next_step": seconds}, step)

    @override
    def took(self, entry: Entry) -> None:
        if self._ledger is not None:
            self._ledger.took(entry)

    @override
    def event(self, name: str, message: str, **facts: Any) -> None:
        self._display.say(message)
        self._write("event", {"name": name, "message": message, **facts})

    @override
    def close(self) -> None:
        for file in (self._lines, self._board, self._ledger):
            if file is not None:
                file.close()
        self._display.close()

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        # JSON has no NaN and no infinity: strict readers refuse what json.dumps would write for them.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._lines.write((json.dumps({"kind": kind, "time": round(time.time(), 3), **finite}) + "\n").encode())

    def _plot(self, values: Mapping[str, float | None], step: int) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        if known:
            self._board.add(known, step)


def _forget_after(path: Path, step: int, epochs_done: int) -> tuple[int, int, int]:
    """Remove from metrics.jsonl what comes after `step`, and a torn last line.

    Returns the last step and the last epoch that are left, and the last step that was there before.

    An epoch whose last step is done, but which a stop or a crash kept from its end, ends again and is then written
    again: its old line goes, too. Only the end of the file is read, back to the record of an earlier step: whatever
    stands before that is of earlier steps as well. Raises OSError where the file cannot be written at all: what is kept
    is written in place, so that a full disk has room for it.
    """
    if not path.exists():
        return step, epochs_done, step  # the run goes on in another folder than the one it began in
    last_step = last_epoch = reached = 0
    kept = list[bytes]()  # of the lines from `begin` on, the last one first
    with open(path, "r+b", opener=in_place) as file:
        begin = 0
        for offset, line in lines_backwards(file):
            begin = offset
            try:
                record = json.loads(line)
                kind, number, _ = record["kind"], int(record.get("step", 0)), int(record.get("epoch", 0))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                continue  # torn when the process was killed, or none of ours
            reached = max(reached, number)
            ends_again = kind == "epoch" and record["epoch"] > epochs_done
            if record.get("step", 0) <= step and not ends_again:
                kept.append(line.rstrip(b"\n") + b"\n")
                if kind == "step":
                    last_step = max(last_step, record["step"])
                if kind in ("step", "epoch"):  # the record of an epoch comes before that of a step of the next one
                    last_epoch = max(last_epoch, record["epoch"] - (kind == "step"))
            if kind == "step" and record["step"] < step:
                break
        tail = b"".join(reversed(kept))
        file.seek(begin)
        if file.read() != tail:
            # In this order: whatever moment the process is killed in, no line that is kept is lost.
            file.seek(begin)
            file.write(tail)
            file.flush()
            os.ftruncate(file.fileno(), begin + len(tail))
            with suppress(OSError):  # a full disk may say so here, too; the lines are cut off all the same
                os.fsync(file.fileno())
    return last_step, last_epoch, reached

"""Report a run to the console, metrics.jsonl, TensorBoard and the ledger."""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from hvd_train.elastic.members import Change
from hvd_train.plain_file import in_place
from hvd_train.run_files.display import LineDisplay, TerminalDisplay
from hvd_train.run_files.ledger import Entry
from hvd_train.run_files.ledger_file import LedgerFile
from hvd_train.run_files.records import EpochRecord, Moment, StepRecord
from hvd_train.run_files.run_folder import METRICS, RunFolder
from hvd_train.run_files.tail import lines_backwards


class Journal:
    """Records a training. This class records nothing, on ranks that do not write."""

    def begin(self, epochs: int, samples_per_epoch: int) -> None:
        """Start the display of a training."""

    def catch_up(self, recent: Sequence[Entry], last_step: StepRecord | None, last_epoch: EpochRecord | None) -> None:
        """Write records that the files lack after the writing rank was lost."""

    def progress(self, moment: Moment) -> None:
        """Show progress; called after every step."""

    def step(self, record: StepRecord) -> None:
        """Write the metrics of a step."""

    def epoch(self, record: EpochRecord) -> None:
        """Write the metrics of an epoch."""

    def world(self, change: Change, step: int, seconds: float) -> None:
        """Report a change of world, which cost `seconds` until its first step."""

    def took(self, entry: Entry) -> None:
        """Write a new or extended entry of the ledger, if there is one."""

    def event(self, name: str, message: str, **facts: Any) -> None:
        """Show a message to the user, and write it with facts; `name` is its kind."""

    def close(self) -> None:
        """Complete the ledger and close the files."""


class RunJournal(Journal):
    """Writes the files of a run folder and shows progress. A full disk delays entries."""

    def __init__(
        self, folder: RunFolder, resumed_step: int, epochs_done: int, *, live: bool, ledger: bool = False
    ) -> None:
        """Open the files of `folder`, without entries after `resumed_step` and `epochs_done`.

        `live` shows a bar instead of lines, `ledger` keeps a ledger. Raises OSError if the files cannot be read.
        """
        from hvd_train.run_files.board import Board  # slow to import, and only one rank needs it

        self._display = TerminalDisplay() if live else LineDisplay()
        report, path = self._display.say, folder.path / METRICS
        self._last_step, self._last_epoch, reached = _forget_after(path, resumed_step, epochs_done)
        self.steps_lost = max(0, reached - resumed_step)  # at least: not every step has a line
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
        # JSON has no NaN and no infinity; json.dumps would write invalid JSON for them.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._lines.write((json.dumps({"kind": kind, "time": round(time.time(), 3), **finite}) + "\n").encode())

    def _plot(self, values: Mapping[str, float | None], step: int) -> None:
        if known := {name: value for name, value in values.items() if value is not None}:
            self._board.add(known, step)


def _forget_after(path: Path, step: int, epochs_done: int) -> tuple[int, int, int]:
    """Remove a torn last line and lines after `step` from metrics.jsonl.

    Return the last step and epoch that are left, and the last step before. The line of an epoch that will end again
    is removed, too. Kept lines are written in place, so that a full disk has room for them. Raises OSError.
    """
    if not path.exists():
        return step, epochs_done, step  # the run resumes in another folder
    last_step = last_epoch = reached = 0
    kept = list[bytes]()  # kept lines since `begin`, the last one first
    with open(path, "r+b", opener=in_place) as file:
        begin = 0
        for offset, line in lines_backwards(file):
            begin = offset
            try:
                record = json.loads(line)
                kind, number, _ = record["kind"], int(record.get("step", 0)), int(record.get("epoch", 0))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                continue  # a torn or foreign line
            reached = max(reached, number)
            ends_again = kind == "epoch" and record["epoch"] > epochs_done
            if record.get("step", 0) <= step and not ends_again:
                kept.append(line.rstrip(b"\n") + b"\n")
                if kind == "step":
                    last_step = max(last_step, record["step"])
                if kind in ("step", "epoch"):  # an epoch's record comes before the next epoch's steps
                    last_epoch = max(last_epoch, record["epoch"] - (kind == "step"))
            if kind == "step" and record["step"] < step:
                break
        tail = b"".join(reversed(kept))
        file.seek(begin)
        if file.read() != tail:
            file.seek(begin)  # write first, then truncate: a kill in between loses no kept line
            file.write(tail)
            file.flush()
            os.ftruncate(file.fileno(), begin + len(tail))
            with suppress(OSError):  # a full disk may fail here; the file is truncated all the same
                os.fsync(file.fileno())
    return last_step, last_epoch, reached

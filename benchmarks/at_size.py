"""What surviving costs at size: the digest of 2 GB, and the files of a run that is in epoch 90 of ImageNet.

    python -m benchmarks.at_size --json benchmarks/records/at-size.json       about a minute

One process, with 5 GB of memory. The state is VGG-19's with Adam, filled up to 2 GB. The files are those of 5,005 steps
of 256 samples in each epoch with a record every ten steps; taking over opens them as a new rank 0 does, and writes what
the state holds of the epoch. All times are medians over the turns, and the longest ones.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.record import about, at_most, show
from hvd_train.progress.fingerprint import fingerprint
from hvd_train.progress.order import Cut, order_of
from hvd_train.run_files.journal import RunJournal
from hvd_train.run_files.ledger import LEDGER, Entry, audit, extended
from hvd_train.run_files.records import StepRecord
from hvd_train.run_files.run_folder import METRICS, RunFolder
from hvd_train.state import TrainState

BYTES = 2_000_000_000
SAMPLES, BATCH, EPOCHS, LOG_STEPS = 1_281_167, 256, 90, 10
STEPS = -(-SAMPLES // BATCH)
AIMS = {
    "digest of 2 GB, seconds": 0.5,
    "taking over in epoch 1, seconds": 1.0,
    "taking over in epoch 90, seconds": 1.0,
    "bytes of the ledger per epoch": 100_000,
    "the ledger's entries in a commit, seconds": 0.05,
}


def state() -> TrainState:
    """Return a state of 2 GB: weights and two moments of each."""
    weights, layer = BYTES // (3 * 4), 4096
    model = nn.ParameterList([nn.Parameter(torch.randn(layer, layer)) for _ in range(weights // layer**2 + 1)])
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), Cut(BATCH, 32))


def write_run(folder: Path, epochs: int) -> list[Entry]:
    """Write ledger and metrics of a run that is at the end of an epoch; return the entries in its state."""
    entries: list[Entry] = []
    with (folder / LEDGER).open("w") as ledger, (folder / METRICS).open("w") as metrics:
        start = {"kind": "event", "name": "start", "num_samples": SAMPLES, "repeated_augmentation": 1, "seed": 0}
        metrics.write(json.dumps(start) + "\n")
        for epoch in range(epochs):
            order, entries = order_of(0, epoch, SAMPLES, 1)[:], []
            for number in range(STEPS):
                start, step = number * BATCH, epoch * STEPS + number + 1
                stop = min(start + BATCH, SAMPLES)
                entry = Entry(epoch, (step, step), 8, (start, stop), fingerprint(order[start:stop]))
                entries = extended(entries, entry, SAMPLES)
                if step % LOG_STEPS == 0:
                    record = StepRecord(epoch + 1, step, step * BATCH, *[0.123456789] * 5, None, 0, 1234.5, None)
                    metrics.write(json.dumps({"kind": "step", "time": time.time(), **vars(record)}) + "\n")
            ledger.writelines(entry.line() for entry in entries)
    return entries


def take_over(folder: Path, entries: list[Entry]) -> None:
    """Do what a new rank 0 does with the files of a run."""
    journal = RunJournal(RunFolder(folder), entries[-1].steps[1], entries[-1].epoch, live=False, ledger=True)
    journal.catch_up(entries, None, None)
    journal.close()


def pickled(entries: list[Entry]) -> None:
    """Do what a commit does with the entries in the state."""
    torch.save([asdict(entry) for entry in entries], io.BytesIO())


def seconds(action: Callable[[], object], turns: int) -> list[float]:
    """Return how long an action takes, turn by turn; a first one is not counted."""
    times = []
    for _ in range(turns + 1):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return times[1:]


def measure(turns: int) -> dict[str, list[float]]:
    """Return the numbers of each turn."""
    numbers = {"digest of 2 GB, seconds": seconds(state().digest, turns)}
    with tempfile.TemporaryDirectory(prefix="at-size-") as name:
        first, last = Path(name) / "first", Path(name) / "last"
        for folder, epochs in ((first, 1), (last, EPOCHS)):
            folder.mkdir()
            entries = write_run(folder, epochs)
            takes_over = partial(take_over, folder, entries)
            numbers[f"taking over in epoch {epochs}, seconds"] = seconds(takes_over, turns)
        numbers["bytes of the ledger per epoch"] = [(last / LEDGER).stat().st_size / EPOCHS]
        numbers["the ledger's entries in a commit, seconds"] = seconds(partial(pickled, entries), turns)
        numbers["audit of 90 epochs, seconds"] = seconds(partial(audit, last), turns)
    return numbers


def main() -> None:
    """Measure, print and, if asked to, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", type=Path, help="the file that takes the record")
    options = parser.parse_args()
    record: dict[str, Any] = about("benchmarks.at_size", sys.argv[1:])
    for what, numbers in measure(options.turns).items():
        record[what] = {"median": float(f"{statistics.median(numbers):.3g}"), "longest": float(f"{max(numbers):.3g}")}
        if aim := AIMS.get(what):
            record[what] |= {"aim": f"at most {aim:,}", "verdict": at_most(aim, (min(numbers), max(numbers)))}
    show(record, options.json)


if __name__ == "__main__":
    main()

"""How a training scales: the same one on several numbers of workers, one after the other, and the table of them.

Each size is a training of its own, started by horovodrun, with a run folder below the output folder; the rows of the
table are read from what it has written there. No torch here.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hvd_train import config_file
from hvd_train.bench.plots import plots
from hvd_train.bench.record import is_of, write
from hvd_train.config import Config
from hvd_train.doctor import questions
from hvd_train.errors import UsageError
from hvd_train.launch import horovodrun, hosts
from hvd_train.numerals import whole_number
from hvd_train.progress import order, schedule
from hvd_train.report.drawing import png
from hvd_train.run_files import durable, run_folder

MODES, CONTROLLERS = ("weak", "strong"), ("gloo", "mpi")
RECORD, TABLE, TEXT = "scaling.json", "scaling.csv", "scaling.txt"


@dataclass(frozen=True)
class Size:
    """A training on so many workers: its settings, and its run folder."""

    workers: int
    config: Config
    folder: Path


@dataclass(frozen=True)
class Row:
    """What a size has come to. None where it is not known; `failed` says why there is nothing at all.

    `epoch_seconds` is the time of training alone, and so is what `images_per_second` and `efficiency` go by.
    """

    workers: int
    learning_rate: float | None = None
    global_batch_size: int | None = None
    steps_per_epoch: int | None = None
    epoch_seconds: float | None = None
    images_per_second: float | None = None
    efficiency: float | None = None
    val_loss: float | None = None
    test_loss: float | None = None
    top1: float | None = None
    failed: str | None = None


def parse_counts(text: str) -> list[int]:
    """Return the numbers of workers in `1,2,4`, in rising order.

    Raises UsageError for other text, for a number that is there twice and for 100,000 workers or more.
    """
    counts = [whole_number(part) or 0 for part in text.split(",")]
    if not all(0 < count < 100_000 for count in counts):
        raise UsageError(f"--np {text}: write numbers of workers from 1 on, as in --np 1,2,4")
    if len(set(counts)) < len(counts):
        raise UsageError(f"--np {text} names a number of workers twice")
    return sorted(counts)


def one_of(flag: str, value: str, known: Sequence[str]) -> str:
    """The value, if it is one of those known. Raises UsageError."""
    if value not in known:
        raise UsageError(f"{flag} {value}: it must be {' or '.join(known)}")
    return value


def check_hosts(counts: Sequence[int], listed: Sequence[hosts.Host], path: str) -> None:
    """Raise UsageError where the hosts have fewer slots than the largest size has workers."""
    slots = sum(host.slots for host in listed)
    if max(counts) > slots:
        raise UsageError(f"--np {max(counts)} needs as many slots; {path} has {slots}: {hosts.describe(listed)}")


def plan(config: Config, counts: Sequence[int], mode: str, folder: Path) -> list[Size]:
    """The trainings to run, all in `folder`. Raises UsageError where something else is in their places."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output-dir {folder} is a file; name a folder")
    if (folder / RECORD).exists() and not is_of("scaling", folder / RECORD):
        raise UsageError(f"{folder / RECORD} is there and no record of `hvd-train bench scaling`; name another folder")
    sizes = []
    for workers in counts:
        path = folder / f"np-{workers}"
        size = Size(workers, sized(config, workers, mode).replace(output_dir=path, progress="lines"), path)
        if (path / run_folder.CONFIG).exists():
            differences = size.config.differences(config_file.load(path / run_folder.CONFIG))
            if differences:
                raise UsageError(
                    f"{path} is a run with other settings ({'; '.join(differences)}): name another --output-dir"
                )
        sizes.append(size)
    return sizes


def sized(config: Config, workers: int, mode: str) -> Config:
    """The config for so many workers. The global batch of one worker grows with them (weak) or stays (strong)."""
    batch = config.batch
    if mode == "weak":
        total = batch.global_batch_size and batch.global_batch_size * workers
        return config.replace(global_batch_size=total)
    if batch.global_batch_size is not None or batch.batch_size is None:
        return config
    return config.replace(batch_size=None, global_batch_size=batch.batch_size * batch.accumulation_steps)


def run(
    sizes: Sequence[Size],
    mode: str,
    folder: Path,
    about: dict[str, Any],
    *,
    host_file: str | None,
    controller: str,
) -> dict[str, Any]:
    """Train all sizes, one after the other, and write the table after each; the record.

    One that fails is a row with the reason. One that has been trained is not trained again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    record: dict[str, Any] = {}
    for size in sizes:
        failed = None
        if (size.folder / run_folder.SUMMARY).exists():
            _say(f"{workers_of(size)}: trained already, in {size.folder}")
        else:
            line = command(size, host_file, controller)
            _say(f"{workers_of(size)}: {shlex.join(line)}")
            failed = _train(line, size)
        rows.append(Row(size.workers, failed=failed) if failed else row_of(size))
        rows = with_efficiency(rows)
        _say(f"{workers_of(size)}: {failed or in_short(rows[-1])}")
        record = {**about, "mode": mode, "rows": [dataclasses.asdict(row) for row in rows]}
        _write_down(folder, record, rows)
    _say(f"\n{table(rows)}\n\nfiles: {folder}")
    return record


def command(size: Size, host_file: str | None, controller: str) -> list[str]:
    """What is typed for one size."""
    begin = horovodrun.line(size.workers, host_file, controller)
    return [*begin, horovodrun.program("hvd-train"), "train", "--config", str(_config_file(size).resolve())]


def row_of(size: Size) -> Row:
    """The row of a finished training, from the files of its run."""
    summary = json.loads((size.folder / run_folder.SUMMARY).read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (size.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    samples = next(line["num_samples"] for line in lines if line.get("name") == "start")
    total = order.choose_cut(size.config.batch, size.workers, samples).global_batch
    # That of the last life of the run; one that had next to nothing left to do has not measured any.
    speeds = [summary["images_per_second"], *(line["images_per_second"] for line in reversed(epochs))]
    speed = next((speed for speed in speeds if speed), None)
    losses = [line["val_loss"] for line in epochs if line["val_loss"] is not None]
    tested = summary["test_top1"] is not None
    return Row(
        workers=size.workers,
        learning_rate=schedule.peak_learning_rate(size.config.optimizer, total),
        global_batch_size=total,
        steps_per_epoch=math.ceil(samples / total),
        epoch_seconds=samples / speed if speed else None,
        images_per_second=speed,
        val_loss=min(losses, default=None),
        test_loss=summary["test_loss"],
        top1=summary["test_top1"] if tested else summary["best_top1"],
    )


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """Images per second and worker over those of the smallest size that ran: the same for weak and strong scaling."""
    base = next((row for row in rows if row.images_per_second), None)
    return [
        dataclasses.replace(row, efficiency=row.images_per_second / row.workers * base.workers / base.images_per_second)
        if base and base.images_per_second and row.images_per_second
        else row
        for row in rows
    ]


_COLUMNS: dict[str, tuple[str, str]] = {
    "workers": ("workers", "d"),
    "learning_rate": ("learning rate", ".4g"),
    "global_batch_size": ("global batch", ",d"),
    "steps_per_epoch": ("steps/epoch", ",d"),
    "epoch_seconds": ("s/epoch", ",.2f"),
    "images_per_second": ("images/s", ",.1f"),
    "efficiency": ("efficiency", ".1%"),
    "val_loss": ("val loss", ".4f"),
    "test_loss": ("test loss", ".4f"),
    "top1": ("top-1", ".2%"),
}


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    lines = [[title for title, _ in _COLUMNS.values()]]
    for row in rows:
        values = [(getattr(row, name), form) for name, (_, form) in _COLUMNS.items()]
        lines.append(["-" if value is None else format(value, form) for value, form in values])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    told = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*told, *(f"{row.workers} workers failed: {row.failed}" for row in rows if row.failed)])


def in_short(row: Row) -> str:
    """A row that has not failed, in a few words."""
    speed = "speed not known" if row.images_per_second is None else f"{row.images_per_second:,.1f} images/s"
    return speed if row.efficiency is None else f"{speed}, efficiency {row.efficiency:.1%}"


def workers_of(size: Size) -> str:
    """How many, in words."""
    return f"{size.workers} worker{'s' * (size.workers != 1)}"


def _say(line: str) -> None:
    print(line, flush=True)


def _config_file(size: Size) -> Path:
    return size.folder.with_name(f"{size.folder.name}.yaml")


def _log_file(size: Size) -> Path:
    return size.folder.with_name(f"{size.folder.name}.log")


def _train(line: Sequence[str], size: Size) -> str | None:
    """Run one size to its end; why it failed, or None. What it prints goes to a file beside its run folder."""
    durable.write_text(_config_file(size), config_file.dump(size.config))
    with open(_log_file(size), "ab") as log:
        begins = log.tell()
        # A group of its own: a terminal's Ctrl-C comes here, and is passed on once.
        with (
            subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            ) as process,
            _passing_signals_to(process) as received,
        ):
            code = process.wait()
    if received:
        _say(f"{workers_of(size)}: stopped; the same command goes on from there")
        raise KeyboardInterrupt
    if code == 0 and (size.folder / run_folder.SUMMARY).exists():
        return None
    with open(_log_file(size), "rb") as file:
        file.seek(begins)
        output = file.read().decode(errors="replace")
    return f"{_reason(output) or f'exit code {code}'} (all it printed: {_log_file(size)})"


def _reason(output: str) -> str:
    """What a training says last of why it has ended."""
    lines = output.splitlines()
    own = [text for _, found, text in (line.partition("hvd-train: ") for line in lines) if found]
    stopped = [line for line in lines if line.startswith("stopped by ")]
    return [*own, *stopped][-1] if own or stopped else questions.first_error(output)


@contextlib.contextmanager
def _passing_signals_to(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """The signals that came; the training commits and ends on them."""
    received: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        received.append(number)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_down(folder: Path, record: dict[str, Any], rows: Sequence[Row]) -> None:
    write(folder / RECORD, record)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*_COLUMNS, "failed"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    durable.write_text(folder / TABLE, text.getvalue())
    durable.write_text(folder / TEXT, table(rows) + "\n")
    for name, chart in plots(record["rows"], record["mode"]).items():
        durable.write(folder / f"{name}.png", png(chart))

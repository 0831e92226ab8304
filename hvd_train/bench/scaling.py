"""Measure scaling: run a job for each number of workers and read its run folder. No torch."""

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL

from hvd_train import config_file, plain_file
from hvd_train.bench import record
from hvd_train.bench.record import Measurement
from hvd_train.config import Config
from hvd_train.console import reasons, show
from hvd_train.errors import UsageError, counted
from hvd_train.launch import start
from hvd_train.launch.child import STOPPING, Child
from hvd_train.launch.hosts import Host
from hvd_train.progress import order, schedule
from hvd_train.run_files import durable, history, run_folder
from hvd_train.run_files.history import number, numbers

_RECORD = "scaling.json"


def plan(config: Config, counts: Sequence[int], mode: str, folder: Path) -> dict[int, Config]:
    """Return the settings for each number of workers.

    Raises UsageError if their run folders have other settings.
    """
    sizes = {}
    for workers in counts:
        path = folder / f"np-{workers}"
        sizes[workers] = size = sized(config, workers, mode).replace(output_dir=path)
        before = path / run_folder.CONFIG
        if before.exists() and (found := size.differences(config_file.load(before))):
            raise UsageError(
                f"{path} is a run with other settings ({'; '.join(found)}): name "
                "another --output-dir"
            )
    return sizes


def sized(config: Config, workers: int, mode: str) -> Config:
    """Return the config for some workers: weak scaling multiplies the global
    batch, strong scaling keeps it.
    """
    batch = config.batch
    if mode == "weak":
        return config.replace(
            global_batch_size=batch.global_batch_size and batch.global_batch_size * workers
        )
    if batch.global_batch_size is not None or batch.batch_size is None:
        return config
    total = batch.batch_size * batch.accumulation_steps
    size = min(batch.batch_size, math.ceil(total / workers))
    return config.replace(batch_size=size, global_batch_size=total, accumulation_steps=1)


def run(
    folder: Path,
    sizes: Mapping[int, Config],
    about: Measurement,
    *,
    hosts: Sequence[Host],
    controller: str,
) -> Measurement:
    """Train all sizes, write the record after each, and return it.

    Raises KeyboardInterrupt, as `train`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = list[Measurement]()
    measured = Measurement()
    for workers, config in sizes.items():
        failed = None
        path = folder / f"np-{workers}"
        name = counted(workers, "worker")
        done = (path / run_folder.SUMMARY).exists()
        if done and config_file.load(path / run_folder.CONFIG).run.max_time == config.run.max_time:
            show(f"{name}: trained already, in {path}")
        else:
            launcher = start.horovodrun(workers, hosts, controller)
            show(f"{name}: {shlex.join(launcher)} hvd-train train")
            failed = train(launcher, config, path)
        rows.append(
            {"workers": workers, "failed": failed} if failed else row_of(workers, config, path)
        )
        add_efficiency(rows)
        show(
            f"{name}: "
            f"{failed or '{:,.1f} images/s'.format(rows[-1]['samples_per_second'] or math.nan)}"
        )
        measured = {**about, "rows": rows}
        record.write(folder / _RECORD, measured)
    show(f"\n{table(rows)}\n\nrecord: {folder / _RECORD}")
    return measured


def train(launcher: Sequence[str], config: Config, folder: Path) -> str | None:
    """Train in processes of their own; return why it failed, or None.

    Raises KeyboardInterrupt after a signal.

    The settings and all that the processes print are files next to the run folder.
    """
    settings = folder.with_name(f"{folder.name}.yaml")
    durable.write_text(settings, config_file.dump(config))
    log_file = folder.with_name(f"{folder.name}.log")
    line = [*launcher, start.program("hvd-train"), "train", "--config", str(settings.resolve())]
    child = Child(STOPPING)
    with open(log_file, "ab", opener=plain_file.in_place) as log:
        begins = log.tell()
        code = child.run(line, stdin=DEVNULL, stdout=log, stderr=log)
    if child.received:
        raise KeyboardInterrupt
    if code == 0 and (folder / run_folder.SUMMARY).exists():
        return None
    output = log_file.read_bytes()[begins:].decode(errors="replace")
    found = reasons(output)
    return f"{found[-1] if found else f'exit code {code}'} (all it printed: {log_file})"


def row_of(workers: int, config: Config, folder: Path) -> Measurement:
    """Return the row of a finished training, from the files in its run folder."""
    found = history.read(folder)
    samples = found.samples_per_epoch or 0
    figure = found.goal[0]
    layout = order.choose_layout(config.batch, workers, samples)
    steps_per_epoch = len(layout.batches(range(samples)))
    # A run that was resumed for its last few steps has no speed in its summary.
    speeds = numbers((*found.epochs, found.summary), "samples_per_second")
    speed = next(filter(None, reversed(speeds)), None)
    return {
        "workers": workers,
        "learning_rate": schedule.peak_learning_rate(config.optimizer, layout.global_batch),
        "global_batch_size": layout.global_batch,
        "steps_per_epoch": steps_per_epoch,
        "epochs": (number(found.summary, "steps") or 0.0) / (steps_per_epoch or 1),
        "epoch_seconds": samples / speed if speed else None,
        "samples_per_second": speed,
        "efficiency": None,
        "val_loss": min(numbers(found.epochs, "val_loss"), default=None),
        "test_loss": found.summary.get("test_loss"),
        "figure": figure,
        figure: found.summary.get(f"test_{figure}", found.summary.get(f"best_{figure}")),
        "failed": None,
    }


def add_efficiency(rows: Sequence[Measurement]) -> None:
    """Set the efficiency of rows: images per second and worker over the first known speed."""
    measured = [row for row in rows if row.get("samples_per_second")]
    for row in measured:
        base = measured[0]["samples_per_second"] / measured[0]["workers"]
        row["efficiency"] = row["samples_per_second"] / row["workers"] / base


def table(rows: Sequence[Measurement]) -> str:
    """Write the rows as a table, with a line for each size that failed."""
    names = [name for name in dict.fromkeys(itertools.chain(*rows)) if name != "failed"]
    failures = [
        f"{row['workers']} workers failed: {row['failed']}" for row in rows if row["failed"]
    ]
    return "\n".join(
        [
            record.table([names, *([_cell(row.get(name)) for name in names] for row in rows)]),
            *failures,
        ]
    )


def _cell(value: float | str | None) -> str:
    return "—" if value is None else value if isinstance(value, str) else f"{value:,.6g}"

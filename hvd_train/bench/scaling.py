"""How a training scales: the same one on several numbers of workers, one after the other, and the table of them.

Each size is a training of its own (`scaling_job`) with a run folder below the output folder; the rows of the table
(`scaling_table`) are read from what it has written there. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from hvd_train import config_file
from hvd_train.bench import scaling_job, scaling_table
from hvd_train.bench.record import Record, is_of
from hvd_train.bench.scaling_job import Size
from hvd_train.bench.scaling_table import RECORD, Row
from hvd_train.config import Config
from hvd_train.console import show
from hvd_train.errors import UsageError
from hvd_train.launch import hosts
from hvd_train.numerals import whole_number
from hvd_train.run_files import run_folder

MODES, CONTROLLERS = ("weak", "strong"), ("gloo", "mpi")


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
    """Return the value of a flag. Raises UsageError where it is not one of those known."""
    if value not in known:
        raise UsageError(f"{flag} {value}: it must be {' or '.join(known)}")
    return value


def ended_by_time(config: Config) -> Config:
    """Return the config of a training whose time limit, if it has one, is the end of it: each size is trained once."""
    limit = config.run.max_time
    if limit is None:
        return config
    if config.schedule.total_time is not None:
        raise UsageError("--max-time and --total-time both end the training of a size: leave out --max-time")
    return config.replace(max_time=None, total_time=limit)


def check_hosts(counts: Sequence[int], listed: Sequence[hosts.Host], path: str) -> None:
    """Raise UsageError where the hosts listed in `path` have fewer slots than the largest size has workers."""
    slots = sum(host.slots for host in listed)
    if max(counts) > slots:
        raise UsageError(f"--np {max(counts)} needs as many slots; {path} has {slots}: {hosts.describe(listed)}")


def plan(config: Config, counts: Sequence[int], mode: str, folder: Path) -> list[Size]:
    """Return the trainings to run, each with a run folder below `folder`.

    Raises UsageError where something else is there: a file, another tool's record, or a run with other settings.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output-dir {folder} is a file; name a folder")
    if (folder / RECORD).exists() and not is_of("scaling", folder / RECORD):
        raise UsageError(f"{folder / RECORD} exists and is no record of `hvd-train bench scaling`; name another folder")
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
    """Return the config for a number of workers.

    The global batch of one worker grows with them (weak scaling) or stays as it is (strong scaling); then each worker
    takes its share in passes as large as those of one worker, or smaller.
    """
    batch = config.batch
    if mode == "weak":
        total = batch.global_batch_size and batch.global_batch_size * workers
        return config.replace(global_batch_size=total)
    if batch.global_batch_size is not None or batch.batch_size is None:
        return config
    total = batch.batch_size * batch.accumulation_steps
    size = min(batch.batch_size, math.ceil(total / workers))
    return config.replace(batch_size=size, global_batch_size=total, accumulation_steps=1)


def run(
    sizes: Sequence[Size],
    mode: str,
    folder: Path,
    about: Record,
    *,
    host_file: str | None,
    controller: str,
) -> Record:
    """Train all sizes, one after the other, write the table after each, and return the record.

    A size that fails becomes a row with the reason; a size that has been trained is not trained again. Raises
    KeyboardInterrupt where SIGINT or SIGTERM has stopped it: the same command goes on from there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    record: Record = {}
    for size in sizes:
        failed = _trained(size, scaling_job.command(size, host_file, controller))
        rows.append(Row(size.workers, failed=failed) if failed else scaling_table.row_of(size))
        rows = scaling_table.with_efficiency(rows)
        show(f"{size}: {failed or scaling_table.in_short(rows[-1])}")
        record = {**about, "mode": mode, "rows": [dataclasses.asdict(row) for row in rows]}
        scaling_table.write(folder, record, rows)
    show(f"\n{scaling_table.table(rows)}\n\nfiles: {folder}")
    return record


def _trained(size: Size, line: Sequence[str]) -> str | None:
    """Train one size unless that has been done, and return why it failed, or None."""
    if size.trained:
        show(f"{size}: trained already, in {size.folder}")
        return None
    show(f"{size}: {shlex.join(line)}")
    try:
        return scaling_job.train(line, size)
    except KeyboardInterrupt:
        show(f"{size}: stopped; the same command goes on from there")
        raise

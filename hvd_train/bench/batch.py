"""Whether the batch is large enough: the real step with larger and larger micro-batches, until one does not fit.

Which size comes next is decided by `batch_search`, and whether a host has memory for it by `batch_memory`.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Iterator, Sequence

import torch

from hvd_train import plugin
from hvd_train.bench import batch_memory, batch_search, utilization
from hvd_train.bench.batch_search import Row
from hvd_train.bench.record import Record, written
from hvd_train.bench.throughput import WARM_UP, Training, speeds
from hvd_train.config import Config
from hvd_train.data.sources import OwnData
from hvd_train.errors import OutOfMemory, UsageError
from hvd_train.network.device import return_freed_memory
from hvd_train.network.usage import peak_memory, resident_memory, restart_peaks
from hvd_train.progress.order import Cut, choose_cut
from hvd_train.world.world import World, together

_MOST_STEPS = 1000
_BAR = 20


def measure(
    config: Config,
    world: World,
    *,
    first: int,
    last: int,
    seconds: float,
    repetitions: int,
    images: OwnData | None = None,
    peak_tflops: float | None = None,
) -> Iterator[tuple[Row, Record | None]]:
    """Yield each size and the record so far, from `first` samples in a pass of a rank to `last`, equal on all ranks.

    There is no record as long as nothing fits. A size is timed for `repetitions` times `seconds`; `images` and
    `peak_tflops` are as in `throughput.measure`. Raises OutOfMemory where not even one sample fits, UsageError where
    every step is skipped, and what training raises where it cannot start.
    """
    sizes = Sizes(config, world, seconds, repetitions, images, peak_tflops)
    try:
        rows: list[Row] = []
        last = min(last, sizes.most)
        first = min(first, last)
        while (size := batch_search.next_size(rows, first, last)) is not None:
            rows.append(sizes.measured(size))
            fits = any(row.failed is None for row in rows)
            yield rows[-1], sizes.record(rows, last) if fits else None
        if all(row.failed for row in rows):
            raise OutOfMemory(f"out of memory with {first} samples in a pass, and with fewer: {rows[-1].failed}")
    finally:
        sizes.close()


class Sizes:
    """Measures one size after the other with the same model, weights and loader processes."""

    def __init__(
        self,
        config: Config,
        world: World,
        seconds: float,
        repetitions: int,
        images: OwnData | None,
        peak_tflops: float | None,
    ) -> None:
        """The arguments are as in `measure`."""
        self._config, self._world, self._seconds, self._repetitions = config, world, seconds, repetitions
        self._training = training = Training(config, world, images)
        self._total = choose_cut(config.batch, world.place.size, training.num_samples).global_batch
        self._peak_tflops = peak_tflops
        self._ideal: Record | None = None
        self._release()
        self._resident = resident_memory()
        self._peaks: dict[int, float] = {}  # of the host's memory, on this rank

    @property
    def most(self) -> int:
        """The samples that a rank can have in a step of this data set."""
        return max(1, self._training.num_samples // self._world.place.size)

    def measured(self, size: int) -> Row:
        """Return the row of a size. All ranks go on to the next one together, whichever of them has no memory for it.

        Raises OutOfMemory in the rare case that a step of several ranks has no memory where a pass of each had, and
        UsageError where a single sample is too few, as for batch norm.
        """
        self._training.cut_into(Cut(size * self._world.place.size, size))
        self._release()
        restart_peaks(self._training.device)
        failed = self._first_failure(self._too_much(size))
        failed = failed or self._first_failure(together(self._world, lambda: self._no_pass(size)))
        if failed:
            return Row(size, failed=failed)
        try:
            return self._timed(size)
        except OutOfMemory:
            if self._world.place.size > 1:  # the others are in the middle of the step
                raise
            return Row(size, failed="out of memory")

    def record(self, rows: Sequence[Row], last: int) -> Record:
        """Return the record of these rows, of which one fits; `last` is the largest size that is looked at."""
        facts = self._training.facts()
        assert self._ideal is not None
        return {
            **{name: facts[name] for name in facts if name not in ("batch_size", "global_batch_size")},
            **self._ideal,
            **_verdict(rows, last, self.most),
            "recipe_global_batch_size": self._total,
            "repetitions": self._repetitions,
            "seconds": self._seconds,
            "rows": _written(rows),
            "config": self._config.as_dict(),
        }

    def close(self) -> None:
        """End the loader processes."""
        self._training.close()

    def _first_failure(self, mine: str | None) -> str | None:
        """Return why a rank cannot take this size, the same on all ranks; None where all of them can."""
        return next((why for why in self._world.gather(mine) if why is not None), None)

    def _too_much(self, size: int) -> str | None:
        """Return why the host has no memory for a size, by what smaller ones took; None where it has."""
        if self._training.device.type != "cpu" or not self._peaks or size < max(self._peaks):
            return None
        more = batch_memory.predicted_peak(self._resident, self._peaks, size) - resident_memory()
        left = batch_memory.left_for_a_rank(self._world.place)
        if more <= left:
            return None
        return f"not tried: it would take about {_gb(more)} GB more, and a rank may take {_gb(max(0.0, left))}"

    def _no_pass(self, size: int) -> str | None:
        """Return why this rank cannot pass so many samples, or None. Raises UsageError where one alone is too few."""
        try:
            self._training.pass_alone()
        except OutOfMemory:
            return "out of memory"
        except ValueError as error:
            if size > 1:
                raise
            raise UsageError(
                f"one sample in a pass is too few for this model ({plugin.first_line(error)}): type --from 2"
            ) from error
        return None

    def _timed(self, size: int) -> Row:
        training, world = self._training, self._world
        if self._ideal is None:
            work = utilization.work_of(training, world)
            precision = self._config.precision.precision
            self._ideal = utilization.ideal(work, training.device, precision, self._peak_tflops)
            training.take(WARM_UP)
        training.take(1)
        longest = max(world.gather(training.timed(1).seconds))
        steps = max(1, min(_MOST_STEPS, math.ceil(self._seconds / longest)))
        measured, _ = training.repeated(steps, self._repetitions)
        found = speeds(world, measured, steps)
        peaks = peak_memory(training.device)
        self._peaks[size] = peaks["peak_memory"]
        return Row(
            size,
            **{name: found[name] for name in ("images_per_second", "images_per_second_interval", "seconds_per_step")},
            steps=steps,
            peak_memory=max(world.gather(peaks.get("peak_gpu_memory", peaks["peak_memory"]))),
            **utilization.reached(self._ideal, found["images_per_second_per_worker"]),
        )

    def _release(self) -> None:
        """Give back what the size before has left, so that the next one finds as much memory as the first."""
        gc.collect()
        return_freed_memory()
        if self._training.device.type == "cuda":
            torch.cuda.empty_cache()


def _written(rows: Sequence[Row]) -> list[Record]:
    """Return the rows as the record has them, in the order of their sizes."""
    return [
        {
            **dataclasses.asdict(row),
            "share": None if row.failed else round(batch_search.share(rows, row.batch_size), 6),
        }
        for row in sorted(rows, key=lambda row: row.batch_size)
    ]


def _verdict(rows: Sequence[Row], last: int, most: int) -> Record:
    """Return what the rows say so far; `largest_that_fits` is None as long as no size did not fit."""
    too_large = batch_search.smallest_failed(rows)
    largest = max(row.batch_size for row in rows if row.failed is None)
    ended_by = None
    if too_large is not None:
        ended_by = "memory"
    elif batch_search.has_fallen(rows):
        ended_by = "speed"
    elif largest >= last:
        ended_by = "data" if last == most else "limit"
    return {
        "fastest": batch_search.fastest(rows),
        "large_enough": batch_search.large_enough(rows),
        "largest_that_fits": None if too_large is None else largest,
        "ended_by": ended_by,
    }


def in_short(row: Row, record: Record | None) -> str:
    """Write a row in one line, for people who wait for the others."""
    if record is None or row.images_per_second is None or row.peak_memory is None:
        return f"batch {row.batch_size:,}: {row.failed}"
    return (
        f"batch {row.batch_size:,}: {row.images_per_second:,.1f} {record['unit']}/s, {_gb(row.peak_memory)} GB at most"
    )


def table(record: Record) -> str:
    """Write the record as a table for people, with what follows from it and what to type."""
    settings, unit, with_share = record["config"], record["unit"], record["peak_tflops"] is not None
    memory = "GPU GB" if record["device"] == "cuda" else "GB"
    lines = [
        f"{settings['model']['model']} ({record['parameters'] / 1e6:.2f} M parameters) on {settings['data']['data']}, "
        f"{settings['precision']['precision']}, {record['workers']} x {record['device']} ({record['controller']})",
        "",
        f"{'batch':>8}{f'{unit}/s':>14}{'ms a step':>12}{memory:>9}{'     MFU' * with_share}  share of the fastest",
    ]
    for row in record["rows"]:
        if row["failed"]:
            lines.append(f"{row['batch_size']:>8,}  {row['failed']}")
            continue
        mfu = f"{row['mfu']:>8.1%}" if with_share and row["mfu"] is not None else ""
        lines.append(
            f"{row['batch_size']:>8,}{row['images_per_second']:>14,.1f}{written(1000 * row['seconds_per_step']):>12}"
            f"{_gb(row['peak_memory']):>9}{mfu}  {row['share']:>6.1%} {'█' * round(_BAR * row['share'])}"
        )
    by_size = {row["batch_size"]: row for row in record["rows"]}
    fastest, enough = by_size[record["fastest"]], by_size[record["large_enough"]]
    if record["ended_by"] == "limit" and enough is record["rows"][-1]:
        verdict = f"batch {enough['batch_size']:,} is the fastest of these; larger ones may be faster, see with --to"
    else:
        verdict = (
            f"batch {enough['batch_size']:,} is large enough: {enough['share']:.0%} of the fastest, "
            f"which is batch {fastest['batch_size']:,}"
        )
    lines += [
        "",
        f"FLOPs: {utilization.told({**record, **fastest}, unit)}",
        verdict,
        f"the largest that fits: {_largest(record)}",
        *batch_search.to_type(enough["batch_size"], record["recipe_global_batch_size"], record["workers"]),
    ]
    return "\n".join(lines)


def _largest(record: Record) -> str:
    """Write which is the largest size that fits, or why that is not known."""
    largest = max(row["batch_size"] for row in record["rows"] if not row["failed"])
    if record["ended_by"] == "memory":
        too_large = min(row["batch_size"] for row in record["rows"] if row["failed"])
        return f"batch {largest:,} ({too_large:,} does not)"
    ends = {
        "speed": "larger ones are slower, and were not tried",
        "data": "the training set has no more samples for a step",
        "limit": f"more were not tried (--to {largest})",
    }
    return f"all up to batch {largest:,}: {ends[record['ended_by']]}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f}"

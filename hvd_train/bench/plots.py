"""The charts of `hvd-train bench scaling` and `bench batch`, made from the rows of their records."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_train.errors import UsageError
from hvd_train.report.charts import Axis, Chart, Series, styled
from hvd_train.run_files import durable


def plots(rows: Sequence[Mapping[str, Any]], mode: str) -> dict[str, Chart]:
    """Return charts over the number of workers, by the names of their files without ending."""
    workers = [row["workers"] for row in rows]
    over = Axis("workers", log=len(workers) > 1, ticks=tuple(workers))
    base = next((row for row in rows if row["images_per_second"]), None)
    # The speed if every worker were as fast as one of the smallest size.
    ideal = [base["images_per_second"] / base["workers"] * count if base else None for count in workers]

    def lines(**columns: Sequence[float | None]) -> tuple[Series, ...]:
        return tuple(
            styled(number, name.replace("_", " "), workers, values)
            for number, (name, values) in enumerate(columns.items())
        )

    def column(name: str) -> list[float | None]:
        return [row[name] for row in rows]

    speed, share = Axis("throughput", "images/s", log=len(workers) > 1), Axis("efficiency", number_format="share")
    return {
        "throughput": Chart(
            f"Throughput ({mode} scaling)", over, speed, lines(measured=column("images_per_second"), ideal=ideal)
        ),
        "efficiency": Chart(f"Scaling efficiency ({mode})", over, share, lines(measured=column("efficiency"))),
        "epoch_time": Chart(
            "Time of an epoch", over, Axis("time", number_format="duration"), lines(training=column("epoch_seconds"))
        ),
        "loss": Chart("Loss", over, Axis("loss"), lines(best_validation=column("val_loss"), test=column("test_loss"))),
        "top1": Chart("Top-1", over, Axis("top-1", number_format="share"), lines(top1=column("top1"))),
    }


def speed_over_batch(rows: Sequence[Mapping[str, Any]], unit: str) -> Chart:
    """Return the chart of the speed over the batch of a rank, from rows of which those that failed have none."""
    known = [row for row in rows if row["images_per_second"] is not None]
    sizes = [row["batch_size"] for row in known]
    # Sizes between powers of two stand too near to one another to be written.
    ticks = tuple(size for size in sizes if size == sizes[0] or size & (size - 1) == 0)
    over = Axis("batch of a rank", log=len(sizes) > 1, ticks=ticks)
    line = styled(0, f"{unit}/s", sizes, [row["images_per_second"] for row in known])
    return Chart("Is the batch large enough?", over, Axis("throughput", f"{unit}/s", zero=True), (line,))


def check_target(path: Path) -> None:
    """Raise UsageError, before anything is measured, where a chart cannot be written to `path`."""
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot {path}: it must end in .png or .svg")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}; make it first")
    if path.exists():
        raise UsageError(f"--plot {path} exists; name another file")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--plot {path}: the folder {path.parent} cannot be written to; name another")


def write(path: Path, chart: Chart) -> None:
    """Write a chart as a picture, PNG or SVG by its name. Raises UsageError where it cannot be written."""
    from hvd_train.report.drawing import png, svg  # slow to import

    picture = png(chart) if path.suffix == ".png" else svg(chart).encode()
    try:
        durable.write(path, picture)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None

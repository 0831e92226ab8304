"""The charts of a scaling table, made from the rows of a scaling.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_train.report.charts import Axis, Chart, Series, styled


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

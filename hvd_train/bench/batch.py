"""Find the largest batch of a pass that fits, and the fastest one, in powers of two. For one process."""

import gc

import psutil
import torch

from hvd_train.bench import record, throughput
from hvd_train.bench.record import Measurement
from hvd_train.config import Config
from hvd_train.console import show
from hvd_train.errors import UsageError
from hvd_train.world.world import World

_SLOWER = 0.8  # of the best speed: on a CPU, two sizes later, larger batches bring nothing
_BAR = 30  # characters


def measure(config: Config, world: World, *, largest: int, steps: int, repetitions: int) -> Measurement:
    """Time steps of 2, 4, 8, ... samples until memory is full, a CPU gets slower, or `largest` is reached.

    Raises UsageError if the first one cannot be trained.
    """
    rows = list[Measurement]()
    size = 2
    ended = ""
    while not ended:
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            sized = config.replace(batch_size=size, global_batch_size=None, accumulation_steps=1)
            found = throughput.measure(sized, world, steps=steps, repetitions=repetitions)
        except (UsageError, torch.OutOfMemoryError) as error:
            if not rows:
                raise
            ended = f"{size}: {str(error).partition(': type')[0].partition('; type')[0]}"
            break
        speed = max(found["samples_per_second_of_repetitions"])  # the least disturbed one
        rows.append({"batch_size": size, "samples_per_second": speed, "seconds_per_step": size / speed})
        rows[-1]["peak_memory_gib"] = found["peak_memory_gib"]
        show(f"{size}: {speed:,.1f} samples/s")
        best = max(rows, key=_speed)
        on_cpu = found["device"] == "cpu"
        grown = rows[-1]["peak_memory_gib"] - rows[0]["peak_memory_gib"]
        if on_cpu and size >= 4 * best["batch_size"] and speed < _SLOWER * _speed(best):
            ended = f"{size}: slower than smaller ones"
        elif on_cpu and 2 * grown > psutil.virtual_memory().available / 2**30:
            ended = f"{2 * size}: this machine has too little free memory"
        elif 2 * size > largest:
            ended = f"{2 * size}: more than --largest {largest}"
        size *= 2
    about = {"device": found["device"], "config": config.as_dict()}
    sizes = {"fastest": max(rows, key=_speed)["batch_size"], "largest": rows[-1]["batch_size"]}
    return {"rows": rows, **sizes, "ended": ended, **about}


def _speed(row: Measurement) -> float:
    return float(row["samples_per_second"])


def table(measured: Measurement) -> str:
    """Write the record as a table with bars, and what to type."""
    rows = [("batch", "samples/s", "ms a step", "peak GiB", "", "")]
    best = max(map(_speed, measured["rows"]))
    for row in measured["rows"]:
        marks = [name for name in ("fastest", "largest") if row["batch_size"] == measured[name]]
        bar = "#" * round(_BAR * _speed(row) / best)
        values = f"{row['batch_size']}", f"{_speed(row):,.1f}", f"{1000 * row['seconds_per_step']:,.2f}"
        rows.append((*values, f"{row['peak_memory_gib']:.2f}", bar.ljust(_BAR), ", ".join(marks)))
    found = f"fastest: --batch-size {measured['fastest']}; largest: --batch-size {measured['largest']}"
    return f"{record.table(rows)}\n{found} (ended at {measured['ended']})"

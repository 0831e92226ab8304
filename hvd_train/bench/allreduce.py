"""Measure sums over the ranks, by size and number format.

Bandwidths as in NVIDIA's nccl-tests (doc/PERFORMANCE.md): algorithm: size / time; bus: that times 2 (n - 1) / n.
"""

import re
from collections.abc import Sequence
from functools import partial

import torch

from hvd_train.bench import record
from hvd_train.bench.record import Measurement, written
from hvd_train.bench.throughput import repeat
from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.network.device import choose_device
from hvd_train.world.world import World, together

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_UNITS = {"": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
_LOOP_S, _MOST_SUMS = 0.1, 1000  # about the time of a repetition, and the most sums in it
_TITLES = {"dtype": "", "size": "size", "microseconds": "microseconds", "95%": "95%"}
_TITLES |= {"algorithm_gb_per_second": "algorithm GB/s", "bus_gb_per_second": "bus GB/s"}


def sizes(smallest: str, largest: str) -> list[int]:
    """Return sizes in bytes, each four times the previous one. Raises UsageError."""
    size, last = _parse("--min-size", smallest), _parse("--max-size", largest)
    if size > last:
        raise UsageError(f"--min-size {smallest} is more than --max-size {largest}")
    return [size * 4**power for power in range(20) if size * 4**power <= last]


def measure(config: Config, world: World, all_sizes: list[int], repetitions: int) -> Measurement:
    """Time sums of all sizes (bytes) and formats; return the record."""
    device = together(world, lambda: choose_device(config, world.place))
    rows = [_row(world, device, dtype, size, repetitions) for dtype in DTYPES for size in all_sizes]
    about = {"workers": world.place.size, "device": device.type, "controller": world.transport(device)}
    return {**about, "repetitions": repetitions, "rows": rows}


def table(measured: Measurement) -> str:
    """Write the record as a table."""
    rows = []
    for row in measured["rows"]:
        unit = next(unit for unit in ("GB", "MB", "KB", "") if row["bytes"] % _UNITS[unit] == 0)
        size = f"{row['bytes'] // _UNITS[unit]:,} {unit or 'B'}"
        interval = row["microseconds_interval"]
        rows.append({**row, "size": size, "95%": interval and " to ".join(map(written, interval))})
    title = f"{measured['workers']} ranks on {measured['device']}, by {measured['controller']}"
    return f"{title}\n{record.table([(key, title, '') for key, title in _TITLES.items()], rows)}"


def row_of(dtype: str, size: int, microseconds: Sequence[float], ranks: int) -> Measurement:
    """Return the row for sums of `size` bytes, with bandwidths in GB/s."""
    mean, interval = record.estimate(microseconds)
    algorithm = round(size / mean / 1e3, 6)
    times = {"microseconds": round(mean, 2), "microseconds_interval": interval}
    bus = round(algorithm * 2 * (ranks - 1) / ranks, 6)
    return {"dtype": dtype, "bytes": size, **times, "algorithm_gb_per_second": algorithm, "bus_gb_per_second": bus}


def _row(world: World, device: torch.device, dtype: str, size: int, repetitions: int) -> Measurement:
    values = torch.zeros(size // DTYPES[dtype].itemsize, dtype=DTYPES[dtype], device=device)  # sums remain zeros

    def sums(count: int) -> None:
        for _ in range(count):
            world.sum(values, f"bench.{dtype}.{size}")

    sums(2)  # the ranks exchange a new name first
    _, (once,) = repeat(world, device, partial(sums, 1), 1)
    count = max(1, min(_MOST_SUMS, round(_LOOP_S / once)))
    _, seconds = repeat(world, device, partial(sums, count), repetitions)
    return row_of(dtype, size, [1e6 * total / count for total in seconds], world.place.size)


def _parse(flag: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]B)?", text.upper())
    if match is None or not (size := int(match[1]) * _UNITS[match[2] or ""]) or size % 4:
        raise UsageError(f"{flag} {text}: write a number of bytes that is a multiple of four, as in 1KB, 64MB or 4096")
    return size

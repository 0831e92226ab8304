"""How fast sums over the ranks travel, by size and number format.

The bandwidths are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md there): the algorithm bandwidth is size / time; the
bus bandwidth is that times 2 (n - 1) / n, which is what each of n ranks must send and receive at least, so that it can
be compared with the hardware's whatever the number of ranks.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import torch

from hvd_train.bench.record import Estimate, Record, estimate, written
from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.network.device import check_own_gpus, choose_device, gpu_identity, synchronize
from hvd_train.world.world import World, barrier, together

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_UNITS = {"": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
_GROWTH = 4  # from one size to the next
_LOOP_S = 0.1  # small sums are repeated for about so long within a repetition
_MOST_SUMS = 1000  # within a repetition


@dataclass(frozen=True)
class Timing:
    """How long a sum of `size` bytes over `ranks` ranks takes on the slowest of them."""

    dtype: str
    size: int
    microseconds: Estimate
    ranks: int

    @property
    def algorithm_bandwidth(self) -> float:
        """The size over the time, in GB/s (10^9 bytes)."""
        return self.size / self.microseconds.mean / 1e3

    @property
    def bus_bandwidth(self) -> float:
        """The least that each rank has sent and received, in GB/s (10^9 bytes)."""
        return self.algorithm_bandwidth * 2 * (self.ranks - 1) / self.ranks

    def as_dict(self) -> dict[str, Any]:
        """Return a row of the record."""
        return {
            "dtype": self.dtype,
            "bytes": self.size,
            "microseconds": round(self.microseconds.mean, 2),
            "microseconds_interval": self.microseconds.interval,
            "algorithm_gb_per_second": round(self.algorithm_bandwidth, 6),
            "bus_gb_per_second": round(self.bus_bandwidth, 6),
        }


def sizes(smallest: str, largest: str) -> list[int]:
    """Return the sizes in bytes from one to the other, each four times the one before.

    Raises UsageError where one of them is no size, or the smallest is larger than the largest.
    """
    size, last = parse_size("--min-size", smallest), parse_size("--max-size", largest)
    if size > last:
        raise UsageError(f"--min-size {smallest} is more than --max-size {largest}")
    chosen = []
    while size <= last:
        chosen.append(size)
        size *= _GROWTH
    return chosen


def parse_size(flag: str, text: str) -> int:
    """Return the bytes that a text such as `64MB` stands for, where a KB is 1,024 bytes.

    Raises UsageError, which names the flag, for anything but a number of bytes that fp32 numbers fill.
    """
    match = re.fullmatch(r"(\d+)([KMG]B)?", text.upper())
    if match is None or not (size := int(match[1]) * _UNITS[match[2] or ""]) or size % 4:
        raise UsageError(f"{flag} {text}: write a number of bytes that is a multiple of four, as in 1KB, 64MB or 4096")
    return size


def written_size(size: int) -> str:
    """Write a number of bytes in its largest whole unit: 65536 is 64 KB."""
    unit = next(unit for unit in ("GB", "MB", "KB", "") if size % _UNITS[unit] == 0)
    return f"{size // _UNITS[unit]:,} {unit or 'B'}"


def measure(config: Config, world: World, all_sizes: list[int], repetitions: int) -> Record:
    """Time sums of all sizes (bytes) in all formats that ranks can sum; return the record, which all ranks get."""
    device = together(world, lambda: choose_device(config, world.place))
    check_own_gpus(world.gather(gpu_identity(device)))
    formats = [name for name, dtype in DTYPES.items() if world.can_sum(dtype)]
    rows = [_timed(world, device, dtype, size, repetitions).as_dict() for dtype in formats for size in all_sizes]
    return {
        "workers": world.place.size,
        "device": device.type,
        "controller": world.transport(device),
        "repetitions": repetitions,
        "rows": rows,
    }


def table(record: Record) -> str:
    """Write the record as a table for people."""
    lines = [
        f"{record['workers']} ranks on {record['device']}, by {record['controller']}",
        f"{'':>5}{'size':>9}{'microseconds (95%)':>34}{'algorithm GB/s':>16}{'bus GB/s':>12}",
    ]
    for row in record["rows"]:
        mean, interval = row["microseconds"], row["microseconds_interval"]
        spread = "" if interval is None else f" ({' to '.join(written(end, mean) for end in interval)})"
        lines.append(
            f"{row['dtype']:>5}{written_size(row['bytes']):>9}{written(mean) + spread:>34}"
            f"{written(row['algorithm_gb_per_second']):>16}{written(row['bus_gb_per_second']):>12}"
        )
    return "\n".join(lines)


def _timed(world: World, device: torch.device, dtype: str, size: int, repetitions: int) -> Timing:
    # Zeros: each sum is the next one's input, and they stay what they are.
    values = torch.zeros(size // DTYPES[dtype].itemsize, dtype=DTYPES[dtype], device=device)
    name = f"bench.{dtype}.{size}"
    _seconds_of_sum(world, values, name, 2)  # the first one pays for a name that the ranks have not exchanged yet
    once = _seconds_of_sum(world, values, name, 1)
    count = world.broadcast(max(1, min(_MOST_SUMS, round(_LOOP_S / once))), 0)
    seconds = [_seconds_of_sum(world, values, name, count) for _ in range(repetitions)]
    slowest = [1e6 * max(of_ranks) for of_ranks in zip(*world.gather(seconds), strict=True)]
    return Timing(dtype, size, estimate(slowest), world.place.size)


def _seconds_of_sum(world: World, values: torch.Tensor, name: str, count: int) -> float:
    """Return the seconds that a sum takes on this rank: the mean of `count` sums, one after the other."""
    barrier(world)
    synchronize(values.device)
    started = time.perf_counter()
    for _ in range(count):
        world.sum(values, name)
    synchronize(values.device)
    return (time.perf_counter() - started) / count

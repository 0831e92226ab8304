"""Memory of a rank with shared weights and without, and of an expert's Horovod loop, on ranks of one host.

    python -m benchmarks.memory --json benchmarks/records/memory.json       about 3 minutes on 2 cores

What processes share counts once: the memory of a program is the sum over its ranks of Pss, in which each page is
divided by the number of processes that have it (proc(5), smaps_rollup). It is read between two steps, after ten.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import about, show
from benchmarks.speed import ENVIRONMENT, SIZES, launch, ours
from benchmarks.turns import started

NETWORKS, RANKS = ("resnet50", "vgg11"), (2, 4)
STEPS = 10
_PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)


def megabytes_of_rank(command: Sequence[str], ranks: int) -> int:
    """Start a program and return how many MB (of 2^20 bytes) a rank has, of the mean of all, after STEPS steps."""
    with (
        tempfile.TemporaryDirectory(prefix="memory-") as folder,
        started(command, Path(folder) / "program", ranks, ENVIRONMENT) as program,
    ):
        program.turn(STEPS)
        turns = program.folder.glob("turns-*[0-9]")  # of each rank, by its process
        return round(sum(_proportional_megabytes(int(path.name.rpartition("-")[2])) for path in turns) / ranks)


def _proportional_megabytes(process: int) -> float:
    found = _PSS.search(Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) / 1024


def commands(network: str, ranks: int) -> dict[str, list[str]]:
    """Return the programs that are measured, by what they are called in the record."""
    image_size, batch = SIZES[network]
    size = ["--image-size", str(image_size)]
    command = [*ours(f"benchmarks.networks:{network}", batch, "gloo", ranks=ranks), *size]
    expert = ["python", "-m", "benchmarks.bare", "horovod-expert", network, str(batch), *size]
    return {
        "shared weights": command,
        "weights of its own": [*command, "--shared-weights", "off"],
        "an expert's Horovod loop": [*launch("gloo", ranks), *expert],
    }


def main() -> None:
    """Measure, print and, if asked to, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file that takes the record")
    options = parser.parse_args()
    megabytes: dict[str, int] = {}
    for network in NETWORKS:
        for ranks in RANKS:
            for name, command in commands(network, ranks).items():
                what = f"{network}, {ranks} ranks, {name}"
                megabytes[what] = megabytes_of_rank(command, ranks)
                print(f"{what}: {megabytes[what]:,} MB a rank", flush=True)
    show({**about("benchmarks.memory", sys.argv[1:]), "megabytes of a rank": megabytes}, options.json)


if __name__ == "__main__":
    main()

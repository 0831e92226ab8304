"""A long training holds no more memory at its end than soon after its start."""

from itertools import combinations
from pathlib import Path
from statistics import median

import pytest

from tests.support.launching import HVD_TRAIN, PROJECT, SCRIPTS, launch_line, output_of
from tests.support.on_demand import EVERY

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS_PER_EPOCH = 19
WARM_UP = 2500  # steps in which allocators and caches grow by 0.6 MB
STEPS = WARM_UP + 2000  # in fewer, a small leak may hide in freed memory
MOST = 150.0  # bytes per step: rank 0 needs about 80; a kept tensor of 64 numbers takes 650 to 800


def slope(values: list[int]) -> float:
    """Return the Theil-Sen slope."""
    return median((other - one) / (j - i) for (i, one), (j, other) in combinations(enumerate(values), 2))


@pytest.mark.parametrize("way", ["one rank", "two ranks", "elastic"])
def test_memory_does_not_grow_from_step_to_step(tmp_path: Path, way: str) -> None:
    """All features that may keep memory are on."""
    ranks, command = {
        "one rank": (1, [HVD_TRAIN, "train"]),
        "two ranks": (2, launch_line("gloo", 2, HVD_TRAIN, "train")),
        "elastic": (2, [str(SCRIPTS / "train_elastic.sh"), "-np", "2", "--"]),
    }[way]
    line = "--data tests.support.runs:few_digits --model tests.support.on_demand:watched --ledger "
    line += f"--epochs {STEPS // STEPS_PER_EPOCH} "
    line += f"--global-batch-size 10 --batch-size {10 // ranks} --eval-epochs 10 --log-steps 10 --commit-steps 100 "
    line += "--device cpu --output-dir run"
    variables = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    output_of([*command, *line.split()], tmp_path, limit_s=850, variables=variables)
    found = [list(map(int, path.read_text().split())) for path in tmp_path.glob("rss-*")]
    assert len(found) == ranks
    for of_rank in found:
        assert len(of_rank) * EVERY >= STEPS - STEPS_PER_EPOCH
        assert slope(of_rank[WARM_UP // EVERY :]) / EVERY < MOST

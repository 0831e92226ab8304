"""Bits that flip anywhere in the memory of real ranks: each is found within one interval, or has left no trace."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.flips import HERE, KINDS
from tests.support.launching import HVD_TRAIN, finished, launch_line
from tests.support.runs import equal

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
RANKS, FLIPS_OF_A_JOB, EVERY, STEPS_OF_AN_EPOCH = 3, 2, 5, 15
MAY_VANISH = 8  # bits below this one
JOB = (
    f"digits --model {HERE}:network --optimizer {HERE}:Momentum --weight-decay 0 --learning-rate 0.05 --device cpu "
    f"--epochs 3 --commit-steps {EVERY} --batch-size 16 --global-batch-size 96 --seed 3"
)
FOUND = re.compile(r"after step (\d+) most ranks hold the same state, but not rank (\d) on (\S+) in (.+)")


def weights_of(folder: Path, name: str, flips: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], str]:
    """Return the final weights of a job with these flips, and what it has printed."""
    command = launch_line("gloo", RANKS, HVD_TRAIN, "train", *JOB.split(), "--output-dir", name)
    variables = {"PYTHONPATH": str(ROOT), "FLIPS": json.dumps(flips), "OMP_NUM_THREADS": "1"}
    code, output = finished(command, folder, 150, variables)
    assert code == 0, output
    return torch.load(folder / name / "model-final.pt", weights_only=True), output


def flips_of(job: int) -> list[dict[str, Any]]:
    """Return what happens in a job: two flips of any kind, on any rank, in any bit of any number."""
    chance = random.Random(job)
    steps = (chance.randrange(7, 17), chance.randrange(24, 34))
    return [
        {
            "name": f"flip-{job}-{number}",
            "rank": chance.randrange(RANKS),
            "pass": 2 * step,  # a rank has two slots in each step
            "kind": KINDS[(FLIPS_OF_A_JOB * job + number) % len(KINDS)],
            "tensor": chance.random(),
            "element": chance.random(),
            "bit": chance.randrange(32),
        }
        for number, step in enumerate(steps)
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The final weights of the job without a flip, in which nothing is found."""
    weights, output = weights_of(tmp_path_factory.mktemp("undisturbed"), "run", [])
    assert "hold" not in output
    return weights


@pytest.mark.parametrize("job", [0, *(pytest.param(job, marks=pytest.mark.long) for job in range(1, 25))])
def test_flipped_bits_are_found_and_undone(job: int, undisturbed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """By the next commit, on the right rank; weights are those of the undisturbed job, to the bit."""
    flips = flips_of(job)
    weights, output = weights_of(tmp_path, "run", flips)
    assert all((tmp_path / flip["name"]).exists() for flip in flips), output
    assert equal(weights, undisturbed), output
    found = dict.fromkeys((int(step), int(rank)) for step, rank, *_ in FOUND.findall(output))
    print("\nflips:", [(flip["kind"], flip["bit"], flip["rank"]) for flip in flips], "found:", [*found])
    assert all(step % EVERY == 0 or step % STEPS_OF_AN_EPOCH == 0 for step, _ in found)
    # The last bits of a number may be lost with the next addition: then there is nothing to find.
    must_be = [flip["rank"] for flip in flips if flip["bit"] >= MAY_VANISH]
    assert [rank for _, rank in found] in (must_be, [flip["rank"] for flip in flips])

"""The programs that ours is compared with: an expert's do the work of the plain ones, and all take their turns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.speed import LAUNCHERS, Peer, Series, measure
from tests.support.bare_steps import STEPS
from tests.support.launching import finished

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.long]

JOB = ["-m", "tests.support.bare_steps"]


def weights(folder: Path, program: str, rank: int) -> Tensor:
    """Return the weights that a rank had after its steps, as one vector."""
    state = torch.load(folder / f"{program}-{rank}.pt")
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


def take_steps(folder: Path, command: list[str]) -> None:
    """Run a job of `tests.support.bare_steps` whose networks need not wait for their turns."""
    (folder / "allowed").write_text("1000000")
    code, output = finished(command, folder, variables={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert code == 0, output


def test_the_programs_of_an_expert_train_the_same_weights(tmp_path: Path) -> None:
    """Horovod and DDP, plain and by an expert, end with the same weights on both ranks; `none` does not."""
    take_steps(tmp_path, [*LAUNCHERS["gloo"], sys.executable, *JOB, "horovod", "horovod-expert"])
    for program in ("ddp", "ddp-expert", "none"):  # each a job: a second group of processes in one may never form
        take_steps(tmp_path, [*LAUNCHERS["torchrun"], *JOB, program])
    plain = weights(tmp_path, "horovod", 0)
    # A gradient is a sum over 60 images, and no number is larger than 1: each addition of each step rounds once.
    bound = STEPS * 60 * torch.finfo(torch.float32).eps
    for rank in (0, 1):
        for program in ("horovod", "horovod-expert", "ddp", "ddp-expert"):
            assert (weights(tmp_path, program, rank) - plain).abs().max() <= bound, program
        assert (weights(tmp_path, "none", rank) - plain).abs().max() > bound


def test_every_program_takes_its_turns() -> None:
    """Ours and each kind of peer start, take turns of a few steps, and are compared."""
    peers = (
        Peer("horovod-expert", "gloo", 1.05, bucket_mb=0),
        Peer("ddp-expert", "torchrun", 1.05, bucket_mb=4),
        Peer("none", "torchrun", 1.08),
        Peer("example", "gloo"),
    )
    found = measure(Series("convnet", "gloo", peers), starts=1, turns=1, seconds=0.01)
    assert list(found["beside"]) == ["horovod-expert (gloo)", "ddp-expert (torchrun)", "none", "example (gloo)"]
    assert all(seconds > 0 for seconds in found["seconds_per_step"].values())
    none = found["beside"]["none"]
    assert none["median"] == pytest.approx(
        found["seconds_per_step"]["ours"] / found["seconds_per_step"]["none"], rel=0.01
    )

"""Train 20 steps through given faults, with threads as workers, and check the promises."""

import itertools
import json
from pathlib import Path
from typing import Any

import torch

from hvd_train import checkpoint
from hvd_train.run_files.ledger import audit
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.elastic import Event, Job, run_elastic
from tests.support.runs import Weights, equal, largest_difference, small_config, trained

TOLERANCE = 1e-5
STEPS = 20
ONE, TWO, THREE = ((f"h{n}", 1) for n in (1, 2, 3))
NUMBERS = itertools.count()


def play(
    events: list[Event], *hosts: tuple[str, int], make: Any = runs.convnet, data: Any = runs.few_digits, **settings: Any
) -> tuple[Job, Path]:
    """Train 20 steps through these events; return the job and its run folder. The first world has all hosts."""
    folder = Path(f"run-{next(NUMBERS)}")
    limits = {name: settings.pop(name) for name in ("fewest", "most", "kind") if name in settings}
    config = small_config(epochs=2, ledger=True, output_dir=folder, **settings)
    job = run_elastic(
        lambda world: trained(world, config, make, data), dict(hosts), events, first=sum(n for _, n in hosts), **limits
    )
    assert job.finish is not None
    assert job.finish.exit_code == 0, job.finish
    return job, folder


def undisturbed(make: Any = runs.convnet, data: Any = runs.few_digits, **settings: Any) -> Weights:
    """Return the weights of the same training on one rank without faults."""
    config = small_config(epochs=2, output_dir=Path(f"undisturbed-{next(NUMBERS)}"), **settings)
    return trained(LocalWorld(), config, make, data)[1]


def check(job: Job, folder: Path, expected: Weights) -> None:
    """Assert that no step is lost, each sample counts once, ranks are equal, and weights are the undisturbed ones."""
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, STEPS), report
    assert all(event["steps_lost"] == 0 for event in events_of(folder))
    assert (written(folder, "step"), written(folder, "epoch")) == ([*range(1, STEPS + 1)], [1, 2])
    weights = [weights for _, weights in job.results]
    assert all(equal(weights[0], other) for other in weights)
    assert largest_difference(weights[0], expected) <= TOLERANCE
    assert equal(weights[0], torch.load(folder / "model-final.pt", weights_only=True))


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Return the changes of world in metrics.jsonl."""
    return [line for line in _lines(folder) if line.get("name") == "world"]


def best_weights(folder: Path) -> tuple[Weights, Weights]:
    """Return the best weights of a run and of the last undisturbed run."""
    alone = Path(f"undisturbed-{next(NUMBERS) - 1}")
    best, of_alone = (torch.load(run / checkpoint.BEST, weights_only=True) for run in (folder, alone))
    return best, of_alone


def written(folder: Path, kind: str) -> list[int]:
    """Return the numbers of the steps or epochs in metrics.jsonl."""
    return [line[kind] for line in _lines(folder) if line["kind"] == kind]

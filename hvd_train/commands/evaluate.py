"""`hvd-train evaluate`: the scores of a trained model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hvd_train.console import PROGRAM, printable
from hvd_train.flags import parse_flags

USAGE = "  evaluate RUN|CHECKPOINT  scores of a run's best weights, or of a checkpoint file\n"


@dataclass(frozen=True)
class EvaluateOptions:
    """Score a run's best weights, or a checkpoint file: loss, top-1, top-5 and top-1 of each class."""

    target: Annotated[Path, tyro.conf.Positional]
    """Run folder or checkpoint file."""
    json: bool = False
    """Print one JSON object, with every digit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the model."""
    trust: bool = False
    """Import the code that the run names as its model or data; it runs with your permissions."""


def run(arguments: list[str]) -> int:
    """Evaluate on all ranks, print the scores on rank 0 and return 0. Raises UsageError for a wrong target."""
    options = parse_flags(EvaluateOptions, arguments, f"{PROGRAM} evaluate")
    from hvd_train.run import connect, evaluate  # imports torch

    world = connect()
    scores = evaluate(options.target, world=world, device=options.device, trust=options.trust)
    if world.place.rank == 0 and options.json:
        print(json.dumps(scores.as_dict()))
    elif world.place.rank == 0:
        if scores.weights:
            print(scores.weights)
        print(f"loss {scores.loss:.6f}  top-1 {scores.top1:.4%}  top-5 {scores.top5:.4%}  ({scores.count:,} images)")
        for name, share in zip(scores.classes, scores.per_class, strict=True):
            print(f"  {printable(name):<20} {share:8.2%}")
    return 0

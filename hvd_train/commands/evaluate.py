"""`hvd-train evaluate`: the scores of a trained model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hvd_train.console import PROGRAM, printable
from hvd_train.flags import parse_flags
from hvd_train.help_page import Page, page_of
from hvd_train.run_files import run_folder

if TYPE_CHECKING:
    from hvd_train.world.world import World

USAGE = """\
  evaluate [RUN|FILE]      scores of a run's best weights, or of those in a file
"""


@dataclass(frozen=True)
class EvaluateOptions:
    """Print the scores of a run's best weights, or of those in a file: what its task measures, and each class."""

    target: Annotated[Path | None, tyro.conf.Positional] = None
    """Run folder, checkpoint file, or the file model-best or model-final of a run folder; default: the newest run."""
    data_dir: Path | None = None
    """Folder of other data, laid out as those of the training."""
    split: Literal["train", "val", "test"] = "val"
    """Which of the sets to score; training images come without random changes."""
    json: bool = False
    """Print one JSON object, with every digit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    trust: bool = False
    """Import the code that the run names as its model or data: it can do here whatever you can."""


def run(arguments: list[str]) -> int:
    """Evaluate on all ranks, let rank 0 print the scores and return 0.

    Raises UsageError where the target holds no trained model, or where there is no such data.
    """
    options = parse_flags(EvaluateOptions, arguments, f"{PROGRAM} evaluate")
    from hvd_train.run import connect, evaluate  # imports torch, which parsing can do without

    world = connect()
    try:
        target = options.target or the_newest(world)
    except BaseException:
        world.close()
        raise
    scores = evaluate(
        target,
        world=world,
        device=options.device,
        trust=options.trust,
        data_dir=options.data_dir,
        split=options.split,
    )
    if world.place.rank != 0:
        return 0
    if options.json:
        print(json.dumps(scores.as_dict()))
        return 0
    figures = [f"{shown.title} {format(scores[shown.name], _finer(shown.form))}" for shown in scores.shown]
    print("  ".join([*map(printable, figures), f"({scores.count:,} samples)"]))
    if scores.per_class:
        print(f"{printable(scores.per_class_title)}:")
    for name, value in scores.per_class.items():
        print(f"  {printable(name):<20} {format(value, scores.per_class_form):>8}")
    return 0


def page(arguments: list[str]) -> Page:
    """Return the help."""
    examples = ("hvd-train evaluate runs/NAME", "horovodrun -np 4 hvd-train evaluate runs/NAME --json")
    return page_of(EvaluateOptions, "evaluate [RUN|FILE] [FLAGS]", examples, "RUN|FILE")


def _finer(form: str) -> str:
    """Return a format with two digits more, for a single line that is to be compared with others."""
    return re.sub(r"\.([0-9]+)", lambda found: f".{int(found[1]) + 2}", form)


def the_newest(world: World) -> Path:
    """Return the newest run that rank 0 sees, which all ranks take. Raises UsageError where it sees none."""
    from hvd_train.world.world import together

    return world.broadcast(together(world, lambda: run_folder.newest() if world.place.rank == 0 else Path()), 0)

"""`hvd-train predict`: what a trained model says about images."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hvd_train.console import PROGRAM, outlive, show
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags
from hvd_train.help_page import Page, page_of
from hvd_train.launch import launcher
from hvd_train.run_files import durable

if TYPE_CHECKING:
    from hvd_train.predict import Prediction

USAGE = """\
  predict RUN|FILE IMAGE.. the likeliest classes of images
"""


@dataclass(frozen=True)
class PredictOptions:
    """Print the likeliest classes of images with their probabilities, by a run's best weights or those in a file."""

    target: Annotated[Path, tyro.conf.Positional]
    """Run folder, checkpoint file, or the file model-best or model-final of a run folder."""
    images: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Image files, and folders with images in them."""
    split: Literal["train", "val", "test"] | None = None
    """Take a whole set of the run's data instead; training images come without random changes."""
    top: int = 5
    """How many classes of each image."""
    json: bool = False
    """Print a JSON object for each image, one a line, with every digit."""
    output: Path | None = None
    """Write a table (CSV) into this new file instead of printing."""
    data_dir: Path | None = None
    """Folder of the run's data, which name the classes, or of others that are laid out alike."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    trust: bool = False
    """Import the code that the run names as its model or data: it can do here whatever you can."""


def run(arguments: list[str]) -> int:
    """Print or write the predictions, and return 0.

    Raises UsageError where the target holds no trained model, or the images or the output cannot be used.
    """
    outlive()  # as in `predict ... | head`
    options = parse_flags(PredictOptions, arguments, f"{PROGRAM} predict")
    _check(options)
    predictions = _predictions(options)
    if options.output is not None:
        _write(options.output, predictions)
        show(options.output)
    elif options.json:
        for prediction in predictions:
            print(json.dumps(dataclasses.asdict(prediction)), flush=True)
    else:
        for prediction in predictions:
            truth = "" if prediction.truth is None else f" (is {prediction.truth})"
            best = ", ".join(f"{name} {probability:.2%}" for name, probability in prediction.best)
            show(f"{prediction.image}{truth}: {best}")
    return 0


def page(arguments: list[str]) -> Page:
    """Return the help."""
    examples = ("hvd-train predict runs/NAME picture.jpg", "hvd-train predict runs/NAME --split val --output table.csv")
    return page_of(PredictOptions, "predict RUN|FILE IMAGE ... [FLAGS]", examples, "RUN|FILE", "IMAGE ...")


def _check(options: PredictOptions) -> None:
    """Raise UsageError for what cannot be, before anything is loaded."""
    launched = launcher.launched(os.environ)
    if launched is not None and launched.size > 1:
        raise UsageError("predict works in one process: type it without a launcher")
    if bool(options.images) == (options.split is not None):
        raise UsageError("which images? name files or folders, or a set of the run's data, as in --split val")
    if options.top < 1:
        raise UsageError(f"--top {options.top}: it must be at least 1")
    if options.output is not None and options.json:
        raise UsageError("--output writes a table, and --json prints objects: leave out one of them")
    if options.output is not None and options.output.exists():
        raise UsageError(f"--output {options.output} exists: name another file, or move it away")
    if options.output is not None and not os.access(options.output.parent, os.W_OK):
        raise UsageError(f"--output {options.output}: no folder {options.output.parent} that can be written to")


def _predictions(options: PredictOptions) -> Iterator[Prediction]:
    from hvd_train import predict  # imports torch, which parsing can do without

    if options.split is not None:
        return predict.of_split(
            options.target,
            options.split,
            top=options.top,
            device=options.device,
            data_dir=options.data_dir,
            trust=options.trust,
        )
    from hvd_train.data import image_files

    return predict.of_files(
        options.target,
        image_files.find(options.images),
        top=options.top,
        device=options.device,
        data_dir=options.data_dir,
        trust=options.trust,
    )


def _write(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write a line for each image: what it is, and pairs of class and probability, best first."""
    rows = list(predictions)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = range(1, len(rows[0].best) + 1 if rows else 1)
    writer.writerow(["image", "truth", *(f"{kind}{number}" for number in numbers for kind in ("class", "probability"))])
    for row in rows:
        writer.writerow([row.image, row.truth or "", *(value for pair in row.best for value in pair)])
    if path.exists():  # it was made meanwhile
        raise UsageError(f"--output {path} exists: name another file, or move it away")
    try:
        durable.write_text(path, text.getvalue())
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}") from None

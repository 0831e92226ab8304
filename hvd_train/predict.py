"""What a trained model says about images: about files that the user names, or about a split of its data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hvd_train.config import Config
from hvd_train.data import sources
from hvd_train.data.batches import Loader, MicroBatch
from hvd_train.data.dataset import SplitName
from hvd_train.data.encoded import EncodedImages
from hvd_train.errors import UsageError
from hvd_train.network.device import autocast
from hvd_train.parts import Parts
from hvd_train.progress.order import Cut, InSequence, assignments
from hvd_train.run import loader_of, trained_parts
from hvd_train.tasks.distillation import Both
from hvd_train.tasks.task import Outputs
from hvd_train.world.world import Place

_MANY = 100  # files from which on loader processes, which take seconds to start, are worth it


@dataclass(frozen=True)
class Prediction:
    """What a model says about one image."""

    image: str
    """The path of its file or another name or, where it has none, its number in its split."""
    truth: str | None
    """The class that it is of, where that is known."""
    best: tuple[tuple[str, float], ...]
    """The classes with the highest probabilities (0 to 1), in falling order."""


def of_files(
    target: Path, files: Sequence[Path], *, top: int, device: str = "auto", data_dir: Path | None = None, trust: bool
) -> Iterator[Prediction]:
    """Yield what the trained model in `target` says about image files, in their order, `top` classes of each.

    The files are seen as evaluation sees the images of its data, which must be there: they name the classes. The other
    arguments are as in `run.evaluate`. Raises UsageError where the target or a file cannot be used.
    """
    from hvd_train.data.image_files import in_place_of_validation  # slow to import

    adapt, workers = partial(in_place_of_validation, paths=files), 0 if len(files) < _MANY else None
    config, parts = trained_parts(target, Place(), device, trust=trust, data_dir=data_dir, adapt=adapt, workers=workers)
    for micro, probabilities in _probabilities(config, parts, loader_of(parts, "val", target), target):
        for sample, row in zip(micro.samples, probabilities, strict=True):
            yield Prediction(str(files[int(sample)]), None, _best(row, parts.data.classes, top))


def of_split(
    target: Path, split: SplitName, *, top: int, device: str = "auto", data_dir: Path | None = None, trust: bool
) -> Iterator[Prediction]:
    """Yield what the trained model in `target` says about each image of a split of its data, with their true classes.

    Arguments and errors are those of `of_files`; the training set comes without random changes.
    """
    adapt = sources.unchanged if split == "train" else sources.as_it_is
    config, parts = trained_parts(target, Place(), device, trust=trust, data_dir=data_dir, adapt=adapt)
    data = parts.data
    source = {"train": data.train, "val": data.val, "test": data.test}[split]
    name = source.name if isinstance(source, EncodedImages) else str
    for micro, probabilities in _probabilities(config, parts, loader_of(parts, split, target), target):
        for sample, label, row in zip(micro.samples, micro.targets.tolist(), probabilities, strict=True):
            yield Prediction(name(int(sample)), data.classes[label], _best(row, data.classes, top))


@torch.no_grad()
def passes(config: Config, parts: Parts, loader: Loader) -> Iterator[tuple[MicroBatch, Outputs, Tensor]]:
    """Yield the micro-batches of a whole set, each sample once and in order, what the model makes of each, and losses.

    These are those of evaluations, float [n] on the CPU. The model is in evaluation mode. All loaders of `parts` are
    closed at the end.
    """
    model, meter, size = parts.model.eval(), parts.meter, config.batch.eval_batch_size
    context = autocast(config.precision.precision, parts.device)
    try:
        for batch in loader.load(0, assignments(InSequence(loader.num_samples), 0, Cut(size, size), 0, 1)):
            for micro in batch.micro_batches:
                with context:
                    outputs = meter.task.forward(model, micro.inputs)
                    losses = meter.evaluated_losses(outputs, micro.targets, len(micro.samples))
                yield micro, outputs, losses.float().cpu()
    finally:
        for each in (parts.train_loader, parts.val_loader, parts.test_loader):
            if each is not None:
                each.close()


def logits_of(outputs: Outputs) -> Tensor:
    """Return the logits [n, classes] float of the model that was trained, where a task is of images of classes."""
    logits: Tensor = outputs.student if isinstance(outputs, Both) else outputs
    return logits.float()


def _probabilities(config: Config, parts: Parts, loader: Loader, target: Path) -> Iterator[tuple[MicroBatch, Tensor]]:
    """Yield the micro-batches of a whole set and probabilities [n, classes] on the CPU.

    Raises UsageError where the task is another than to tell classes of images apart.
    """
    if not parts.meter.task.images_of_classes:
        raise UsageError(f"{target} was trained for --task {config.task.task}; predict is for images of classes")
    for micro, outputs, _ in passes(config, parts, loader):
        yield micro, logits_of(outputs).softmax(1).cpu()


def _best(row: Tensor, classes: Sequence[str], top: int) -> tuple[tuple[str, float], ...]:
    values, numbers = row.topk(min(top, len(classes)))
    return tuple((classes[number], value) for number, value in zip(numbers.tolist(), values.tolist(), strict=True))

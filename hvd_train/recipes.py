"""Named, complete configurations. Each is a function whose docstring says the command, the machine and the result."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvd_train import plugin
from hvd_train.config import Config
from hvd_train.errors import UsageError, unknown_name
from hvd_train.numerals import whole_number
from hvd_train.settings.batch import BatchConfig
from hvd_train.settings.data import ENCODED, DataConfig
from hvd_train.settings.model import ModelConfig
from hvd_train.settings.optimizer import OptimizerConfig
from hvd_train.settings.precision import PrecisionConfig
from hvd_train.settings.schedule import ScheduleConfig
from hvd_train.settings.task import TaskConfig


def digits() -> Config:
    """A small convnet on scanned handwritten digits (1,797 images of 8 x 8 pixels, no download).

    `horovodrun -np 2 hvd-train train digits`: under a minute on two CPU cores, at least 98% top-1.
    """
    return Config(
        recipe="digits",
        data=DataConfig(data="digits"),
        model=ModelConfig(model="digits-convnet"),
        batch=BatchConfig(global_batch_size=64),
        optimizer=OptimizerConfig(optimizer="sgd", learning_rate=0.1, nesterov=True, weight_decay=5e-4),
        schedule=ScheduleConfig(epochs=20, schedule="cosine", warmup_epochs=1),
    )


def diabetes() -> Config:
    """Regression: a small network on a table of 442 patients with ten numbers each (no download).

    `horovodrun -np 2 hvd-train train diabetes`: ten seconds on two CPU cores, R2 of 0.5 or more; ordinary least squares
    has 0.55 on the same held-out rows, so there is little for a network to find.
    """
    return Config(
        recipe="diabetes",
        data=DataConfig(data="diabetes"),
        task=TaskConfig(task="regression"),
        model=ModelConfig(model="table-network"),
        batch=BatchConfig(global_batch_size=32),
        optimizer=OptimizerConfig(optimizer="adamw", learning_rate=0.002, weight_decay=0.1),
        schedule=ScheduleConfig(epochs=30, schedule="cosine", warmup_epochs=1),
    )


def digit_shapes() -> Config:
    """Semantic segmentation: which digit each pixel of a picture with three of them belongs to (no download).

    `horovodrun -np 2 hvd-train train digit-shapes`: a minute on two CPU cores, mean IoU of 78% or more.
    """
    return Config(
        recipe="digit-shapes",
        data=DataConfig(data="digit-shapes"),
        task=TaskConfig(task="segmentation"),
        model=ModelConfig(model="segmentation-convnet"),
        batch=BatchConfig(global_batch_size=32),
        optimizer=OptimizerConfig(optimizer="adamw", learning_rate=0.005, weight_decay=0.01),
        schedule=ScheduleConfig(epochs=15, schedule="cosine", warmup_epochs=1),
    )


def python_docs() -> Config:
    """A causal language model of bytes, on the texts that Python ships for its help() (no download).

    `horovodrun -np 2 hvd-train train python-docs`: a minute on two CPU cores, a perplexity below 5 for each byte.
    """
    return Config(
        recipe="python-docs",
        data=DataConfig(data="python-docs"),
        task=TaskConfig(task="language-model"),
        model=ModelConfig(model="small-transformer"),
        batch=BatchConfig(global_batch_size=16, batch_size=4),
        optimizer=OptimizerConfig(optimizer="adamw", learning_rate=0.003, weight_decay=0.1, clip_norm=1.0),
        schedule=ScheduleConfig(epochs=3, schedule="cosine", warmup_epochs=0.2),
    )


def cifar10_resnet18_transfer() -> Config:
    """ResNet-18 with weights from ImageNet, of which only a new last layer is trained, on CIFAR-10 at 224 pixels.

    `horovodrun -np 2 hvd-train train cifar10-resnet18-transfer --download`: 2 GPUs. It has not been trained to its
    end here, so we have no figure of our own.
    """
    return Config(
        recipe="cifar10-resnet18-transfer",
        data=DataConfig(data="cifar10", image_size=224),
        model=ModelConfig(model="resnet18", weights="DEFAULT", freeze="backbone", sync_batch_norm=True),
        batch=BatchConfig(batch_size=32, accumulation_steps=4),
        optimizer=OptimizerConfig(optimizer="adam", learning_rate=0.001, weight_decay=0.0),
        schedule=ScheduleConfig(epochs=50, schedule="cosine", warmup_epochs=1),
        precision=PrecisionConfig(precision="fp16"),
    )


def cifar10_resnet50() -> Config:
    """ResNet-50 from random weights on CIFAR-10.

    `horovodrun -np 4 hvd-train train cifar10-resnet50 --download`: 4 GPUs. The network is torchvision's, whose first
    layer is made for images of 224 pixels: expect less than is published for networks made for CIFAR. It has not been
    trained to its end here, so we have no figure of our own.
    """
    return Config(
        recipe="cifar10-resnet50",
        data=DataConfig(data="cifar10", workers=8),
        model=ModelConfig(model="resnet50"),
        batch=BatchConfig(batch_size=128),
        optimizer=OptimizerConfig(
            optimizer="sgd", learning_rate=0.1, lr_scaling="linear", lr_base_batch=128, momentum=0.9, weight_decay=5e-4
        ),
        schedule=ScheduleConfig(epochs=200, schedule="cosine", warmup_epochs=5),
    )


def imagenet20_vgg19() -> Config:
    """VGG-19 with weights from ImageNet and a new last layer, all of it trained, on folders of 20 classes.

    `horovodrun -np 4 hvd-train train imagenet20-vgg19 --data-dir DATA --total-time 2h`: 4 GPUs. DATA holds train/, val/
    and test/; the weights of the lowest validation loss are kept and tested at the end. The learning rate is 1e-4 times
    the square root of the number of workers. We have no figure of our own, since the 20 classes are the user's choice.
    """
    return Config(
        recipe="imagenet20-vgg19",
        data=DataConfig(data="folder", data_dir=Path("data/imagenet20")),
        model=ModelConfig(model="vgg19", weights="DEFAULT"),
        batch=BatchConfig(batch_size=32),
        optimizer=OptimizerConfig(
            optimizer="adam", learning_rate=1e-4, lr_scaling="sqrt", lr_base_batch=32, weight_decay=0.0
        ),
        schedule=ScheduleConfig(epochs=100, schedule="constant", best_by="loss"),
    )


def imagenet_resnet50() -> Config:
    """ResNet-50 (or another network, by --model) on ImageNet's folders in 90 epochs, with the schedule of Goyal et al.

    `horovodrun -np 8 hvd-train train imagenet-resnet50 --data-dir DATA`: 8 GPUs, mixed precision; 76.1% top-1 is
    published for it (torchvision, IMAGENET1K_V1). AlexNet and VGG start at a learning rate
    of 0.01. `--target-accuracy 0.75` ends it at 75%.
    """
    return Config(
        recipe="imagenet-resnet50",
        data=DataConfig(data="folder", data_dir=Path("data/imagenet"), workers_per_host=32),
        model=ModelConfig(model="resnet50"),
        batch=BatchConfig(batch_size=208),
        optimizer=OptimizerConfig(
            optimizer="sgd", learning_rate=0.1, lr_scaling="linear", lr_base_batch=256, momentum=0.9, weight_decay=1e-4
        ),
        schedule=ScheduleConfig(epochs=90, schedule="step", decay_epochs=(30, 60), warmup_epochs=5),
        precision=PrecisionConfig(precision="fp16", compression="fp16"),
    )


def imagenet_resnet50_modern() -> Config:
    """ResNet-50 on ImageNet's folders by today's practice, that of torchvision's second set of weights.

    `horovodrun -np 8 hvd-train train imagenet-resnet50-modern --data-dir DATA`: 8 GPUs, mixed precision; 80.9% top-1 is
    published for it (torchvision, IMAGENET1K_V2).
    """
    return Config(
        recipe="imagenet-resnet50-modern",
        data=DataConfig(
            data="folder",
            data_dir=Path("data/imagenet"),
            image_size=176,
            val_crop_size=224,
            val_resize_size=232,
            augment="trivial",
            random_erasing=0.1,
            mixup=0.2,
            cutmix=1.0,
            repeated_augmentation=4,
            workers=8,
        ),
        model=ModelConfig(model="resnet50"),
        batch=BatchConfig(batch_size=128),
        optimizer=OptimizerConfig(
            optimizer="sgd",
            learning_rate=0.5,
            lr_scaling="linear",
            lr_base_batch=1024,
            momentum=0.9,
            weight_decay=2e-5,
            decay_of="weights",
            label_smoothing=0.1,
            ema_decay=0.99997,
        ),
        schedule=ScheduleConfig(epochs=600, schedule="cosine", warmup_epochs=5),
        precision=PrecisionConfig(precision="fp16", compression="fp16"),
    )


RECIPES: dict[str, Callable[[], Config]] = {
    "digits": digits,
    "diabetes": diabetes,
    "digit-shapes": digit_shapes,
    "python-docs": python_docs,
    "cifar10-resnet18-transfer": cifar10_resnet18_transfer,
    "cifar10-resnet50": cifar10_resnet50,
    "imagenet20-vgg19": imagenet20_vgg19,
    "imagenet-resnet50": imagenet_resnet50,
    "imagenet-resnet50-modern": imagenet_resnet50_modern,
}
DEFAULT = "digits"


def get(name: str) -> Config:
    """Return the config of a recipe by its name. Raises UsageError, with the nearest name, where there is none."""
    if name not in RECIPES:
        if Path(name).is_dir():
            folder = shlex.quote(name)
            raise UsageError(
                f"{name!r} is a folder, and no recipe: for images in train/ and val/, a folder for each class, type "
                f"--data folder --data-dir {folder}, or a recipe, as in imagenet-resnet50 --data-dir {folder}"
            )
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]()


def give_way(recipe: Config, typed: Mapping[str, str]) -> tuple[Config, list[str]]:
    """Return a recipe's config without what does not go with the flags in `typed`, and a note for each such setting.

    `typed` has the text of each flag by its name, as in {"--epochs": "1"}. What was typed itself does not give way.
    """
    data, schedule, batch = recipe.data, recipe.schedule, recipe.batch
    changes: list[tuple[str, Any, str]] = []  # setting, value, and the flag that asks for it
    epochs = whole_number(typed.get("--epochs", ""))
    if typed.get("--schedule", "").lower() == "one-cycle":  # whose rise is longer
        changes.append(("warmup_epochs", 0.0, "--schedule"))
    elif epochs and schedule.warmup_epochs > epochs:
        changes.append(("warmup_epochs", schedule.warmup_epochs * epochs / schedule.epochs, "--epochs"))
    if epochs and epochs % data.repeated_augmentation:
        changes.append(("repeated_augmentation", math.gcd(epochs, data.repeated_augmentation), "--epochs"))
    if recipe.optimizer.nesterov and typed.get("--optimizer", "sgd").lower() not in ("sgd", "lars"):
        changes.append(("nesterov", False, "--optimizer"))
    if recipe.optimizer.nesterov and typed.get("--momentum") in ("0", "0.0"):
        changes.append(("nesterov", False, "--momentum"))
    total, size = whole_number(typed.get("--global-batch-size", "")), whole_number(typed.get("--batch-size", ""))
    if total and total % ((size or batch.batch_size or 1) * batch.accumulation_steps):
        changes.append(("accumulation_steps", 1, "--global-batch-size"))
    if typed.get("--data", "folder").partition(":")[0] not in ENCODED:
        changes += [("val_crop_size", None, "--data"), ("val_resize_size", None, "--data")]
    if plugin.is_reference(typed.get("--data", "")):  # whose items are as the user makes them
        changes += [("augment", "standard", "--data"), ("random_erasing", 0.0, "--data")]
    model = typed.get("--model", "")
    if model == "digits-convnet" or ":" in model:  # there are no weights of torchvision's for it
        changes += [("weights", None, "--model"), ("freeze", "none", "--model")]
    notes, before = [], recipe.settings()
    for name, value, cause in changes:
        flag = f"--{name.replace('_', '-')}"
        if value == before[name] or not {flag, f"--no-{name}"}.isdisjoint(typed):
            continue
        recipe = recipe.replace(**{name: value})
        if isinstance(value, bool):
            now, was = (flag if on else f"--no-{flag.removeprefix('--')}" for on in (value, before[name]))
        else:
            now, was = f"{flag} {_as_typed(value)}", _as_typed(before[name])
        notes.append(f"{now} instead of the recipe's {was}, which does not go with {cause} {typed[cause]}")
    return recipe, notes


def _as_typed(value: Any) -> str:
    return "none" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def suited(config: Config) -> Config:
    """Return the config with what its recipe changes for networks other than its own.

    `imagenet-resnet50` trains networks without batch norm with a lower learning rate. Call this only where the user has
    not typed one.
    """
    without_norms = config.model.model.startswith(("alexnet", "vgg")) and not config.model.model.endswith("_bn")
    if config.recipe == "imagenet-resnet50" and without_norms:
        return config.replace(learning_rate=0.01)  # 0.1 makes networks without batch norm diverge
    return config

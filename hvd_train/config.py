"""The whole vocabulary of a run: frozen dataclasses that check themselves when they are made.

Field names are unique across the groups, so that a flag needs no prefix (`--epochs`) and
`config.replace(epochs=5)` needs no path. A field made with `free` may change when a run is resumed;
every other one decides the result, so a run folder belongs to one value of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from hvd_train.errors import UsageError, unknown_name

T = TypeVar("T")
_MOST_PROFILED_STEPS = 50


def free(default: T) -> T:
    """A field with this default that says where or how often, not what: it may differ on resume."""
    value: T = field(default=default, metadata={"free": True})
    return value


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, from where, and what is done to them."""

    data: str = "digits"
    """Data set: digits, cifar10, cifar100, folder, synthetic, or your own as package.module:function."""
    data_dir: Path | None = free(None)
    """Folder of the data: for `folder` it holds train/ and val/ with one folder per class."""
    download: bool = free(False)
    """Fetch the data set into the data folder if it is not there (cifar10, cifar100)."""
    image_size: int | None = None
    """Side of the square images the model sees, in pixels; the data set's own size if not given."""
    val_crop_size: int | None = None
    """Side of the square that evaluation looks at, in pixels, for `folder`; default: image-size."""
    val_resize_size: int | None = None
    """Length of the shorter side before that square is cut out; default: 256 for each 224 of it."""
    augment: Literal["standard", "trivial", "rand", "none"] = "standard"
    """Random changes to training images: what is usual for the data set, the same and then TrivialAugment (wide) or
    RandAugment, or none."""
    random_erasing: float = 0.0
    """Probability with which a rectangle of a training image is blanked."""
    mixup: float = 0.0
    """Blend the images of a micro-batch in pairs, with shares drawn from Beta(mixup, mixup); 0: do not."""
    cutmix: float = 0.0
    """Paste a rectangle of another image instead, with an area drawn from Beta(cutmix, cutmix); with --mixup as well,
    each micro-batch gets one of the two."""
    repeated_augmentation: int = 1
    """Every sample this many times in a row, changed differently each time, in as many epochs once."""
    workers: int | None = free(None)
    """Loader processes per rank, for data read from files (0: load in the training process); default: 4, or as many as
    the rank has cores."""
    workers_per_host: int | None = free(None)
    """Loader processes of all ranks of a host together, instead of `workers`."""
    synthetic_samples: int = 2048
    """Number of training images of the `synthetic` data set."""

    def __post_init__(self) -> None:
        _at_least("image-size", self.image_size, 1)
        _at_least("val-crop-size", self.val_crop_size, 1)
        _at_least("val-resize-size", self.val_resize_size, self.val_crop_size or 1)
        _at_least("repeated-augmentation", self.repeated_augmentation, 1)
        _share("random-erasing", self.random_erasing)
        _at_least("mixup", self.mixup, 0)
        _at_least("cutmix", self.cutmix, 0)
        if self.data != "folder" and (self.val_crop_size or self.val_resize_size):
            raise UsageError(f"--val-crop-size and --val-resize-size go with --data folder, not with {self.data}")
        _at_least("workers", self.workers, 0)
        _at_least("workers-per-host", self.workers_per_host, 0)
        _at_least("synthetic-samples", self.synthetic_samples, 1)
        if self.data == "folder" and self.data_dir is None:
            raise UsageError("--data folder needs --data-dir: the folder that holds train/ and val/")
        if self.download and self.data not in ("cifar10", "cifar100"):
            raise UsageError(f"--download does not go with --data {self.data}: it works for cifar10 and cifar100")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network."""

    model: str = "digits-convnet"
    """A torchvision classification model by name, timm's as timm:NAME, digits-convnet, or your own as
    package.module:function."""
    weights: str | None = None
    """Weights to start from: torchvision's by name (DEFAULT, IMAGENET1K_V2; images are then normalised as theirs were),
    or a file with a plain state_dict. A last layer for other classes is left out."""
    freeze: str = "none"
    """Parameters that are not trained: none, backbone (all but the last layer), or names, as in layer[12].*"""
    sync_batch_norm: bool = False
    """Batch norm over the samples of all workers, instead of those of each micro-batch."""
    unfreeze: tuple[str, ...] = ()
    """Train frozen parameters after so many epochs: EPOCH:NAMES, as in --unfreeze 5:layer4.* 10:*"""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How many samples a step takes, and how they are cut for the workers."""

    batch_size: int | None = None
    """Samples per worker in one forward pass (and the group that batch norm normalises over)."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all workers; default: batch size x accumulation steps x workers."""
    accumulation_steps: int = 1
    """Forward passes per worker and optimizer step."""
    eval_batch_size: int = 256
    """Samples per worker in one forward pass of an evaluation."""
    on_resize: Literal["global", "per-worker"] = "global"
    """When workers come or go: keep the global batch, or the batch per worker (the learning rate follows)."""

    def __post_init__(self) -> None:
        _at_least("batch-size", self.batch_size, 1)
        _at_least("global-batch-size", self.global_batch_size, 1)
        _at_least("accumulation-steps", self.accumulation_steps, 1)
        _at_least("eval-batch-size", self.eval_batch_size, 1)
        if self.batch_size is None and self.global_batch_size is None:
            raise UsageError("no batch size: give --batch-size (per worker) or --global-batch-size")
        if self.on_resize == "per-worker" and self.global_batch_size is not None:
            raise UsageError("--on-resize per-worker needs --batch-size (per worker), without --global-batch-size")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How a gradient changes the weights."""

    optimizer: Literal["sgd", "adam", "adamw", "lars", "lamb"] = "sgd"
    """Optimizer; lars and lamb, for large batches, are timm's (pip install timm)."""
    learning_rate: float = 0.1
    """Peak learning rate, for a global batch of `lr-base-batch` where it is scaled."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows the global batch: not, in proportion, or with its square root."""
    lr_base_batch: int = 256
    """The global batch for which `learning-rate` was chosen (with --lr-scaling linear or sqrt)."""
    momentum: float = 0.9
    """Momentum of SGD and LARS."""
    nesterov: bool = False
    """Nesterov momentum."""
    weight_decay: float = 5e-4
    """Weight decay."""
    decay_of: Literal["all", "weights"] = "all"
    """What decays: all parameters, or all but biases and those of normalisation layers."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over all classes, 0 to 1."""
    reduction: Literal["average", "adasum"] = "average"
    """What the workers' gradients become: their average, or Adasum, which adds what they do not have in common (with
    MPI, on 1, 2, 4, 8, ... workers)."""
    gradient_predivide_factor: float = 1.0
    """Divide gradients by this before they are added over the workers, and multiply by it afterwards."""
    fusion_groups: int | None = None
    """Send gradients in so many groups; default: groups of about 25 MB."""
    clip_norm: float | None = None
    """Largest 2-norm of the whole gradient; larger ones are scaled down to it."""
    ema_decay: float | None = None
    """Keep a moving average of the weights, which becomes `ema-decay` of itself and the rest of the new ones after each
    step (0.999, say): it is what is evaluated and written as best and final weights."""

    def __post_init__(self) -> None:
        _positive("learning-rate", self.learning_rate)
        _at_least("lr-base-batch", self.lr_base_batch, 1)
        _at_least("weight-decay", self.weight_decay, 0)
        _within("momentum", self.momentum, 0, 1)
        _within("label-smoothing", self.label_smoothing, 0, 1)
        _positive("clip-norm", self.clip_norm)
        _positive("gradient-predivide-factor", self.gradient_predivide_factor)
        _at_least("fusion-groups", self.fusion_groups, 1)
        if self.reduction == "adasum" and self.clip_norm is not None:
            raise UsageError(
                "--clip-norm does not go with --reduction adasum, whose result has another length for the same "
                "gradients of the workers; leave one of them out"
            )
        if self.reduction == "adasum" and self.gradient_predivide_factor != 1:
            raise UsageError("--gradient-predivide-factor does not go with --reduction adasum, which adds no gradients")
        _within("ema-decay", self.ema_decay or 0.0, 0, 1)
        if self.nesterov and (self.optimizer not in ("sgd", "lars") or self.momentum == 0):
            raise UsageError("--nesterov needs --optimizer sgd or lars with a momentum above 0")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How long, and how the learning rate moves."""

    epochs: int = 10
    """Passes over the training set."""
    target_accuracy: float | None = free(None)
    """Stop after the evaluation whose top-1 reaches this share, 0 to 1."""
    patience: int | None = free(None)
    """Stop when so many epochs have brought no better evaluation."""
    best_by: Literal["top1", "loss"] = "top1"
    """Which evaluation is the best one: that of the highest top-1, or of the lowest loss."""
    schedule: Literal["constant", "cosine", "step"] = "cosine"
    """Learning rate after the warm-up: constant, a half cosine down to 0, or steps down."""
    warmup_epochs: float = 0.0
    """Epochs (fractions allowed) over which the learning rate rises linearly from 0."""
    decay_epochs: tuple[float, ...] = (30, 60, 80)
    """Epochs at which --schedule step multiplies the learning rate by `decay-factor`."""
    decay_factor: float = 0.1
    """Factor of --schedule step."""

    def __post_init__(self) -> None:
        _at_least("epochs", self.epochs, 1)
        _at_least("warmup-epochs", self.warmup_epochs, 0)
        _at_least("patience", self.patience, 1)
        _positive("target-accuracy", self.target_accuracy)
        _share("target-accuracy", self.target_accuracy or 0.0)
        _positive("decay-factor", self.decay_factor)
        if list(self.decay_epochs) != sorted(self.decay_epochs):
            raise UsageError("--decay-epochs must rise, as in --decay-epochs 30 60 80")
        if self.warmup_epochs > self.epochs:
            raise UsageError(
                f"--warmup-epochs {self.warmup_epochs:g} is longer than the whole run (--epochs {self.epochs})"
            )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of the arithmetic and of what travels between workers."""

    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Arithmetic of forward and backward: fp16 (with loss scaling) and bf16 are mixed precision."""
    compression: Literal["auto", "none", "fp16"] = "auto"
    """Gradients on the wire: fp16 (with loss scaling) or as they are; auto: fp16 on GPUs, none on CPUs."""
    channels_last: Literal["auto", "on", "off"] = "auto"
    """Keep the channels innermost in memory, which convolutions on GPUs like; auto: for mixed precision there."""
    compile: bool = False
    """Compile the model with torch.compile: faster steps after a start of a minute or more."""
    deterministic: bool = False
    """Only operations that give the same bits each time on a GPU, too (CPUs always do); slower."""
    max_skipped_steps: int = 10
    """Give up when so many steps in a row had a loss or a gradient that is not finite; each is skipped."""

    def __post_init__(self) -> None:
        _at_least("max-skipped-steps", self.max_skipped_steps, 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where it runs, what it leaves behind and how often: nothing here changes the result."""

    device: Literal["auto", "cpu", "cuda"] = free("auto")
    """Where the model lives; auto: a GPU per rank where there is one."""
    gpu_ids: tuple[int, ...] | None = free(None)
    """GPUs of each host for its ranks, in their order; default: 0, 1, 2, ..."""
    output_dir: Path | None = free(None)
    """Run folder; default: runs/RECIPE-TIME, or that of the same command if it was stopped on its way."""
    resume: str = free("auto")
    """auto: go on from the newest good checkpoint of the run folder; never; or a checkpoint file."""
    commit_steps: int | None = free(None)
    """Write a checkpoint every so many steps."""
    commit_seconds: float | None = free(60.0)
    """Write a checkpoint when the last one is so many seconds old."""
    keep_checkpoints: int = free(3)
    """How many of the newest checkpoints stay on disk."""
    log_steps: int = free(10)
    """Steps from one line of metrics to the next."""
    log_dir: Path | None = free(None)
    """Also keep what each rank prints, in a file of its own in this folder."""
    progress: Literal["auto", "bar", "lines"] = free("auto")
    """A live bar or plain lines; auto: a bar for one process at a terminal (launchers forward lines)."""
    max_time: str | None = free(None)
    """Stop with a commit after so long, as in 2h30m, 90m or 45s; the same command goes on from there."""
    ledger: bool = free(False)
    """Write the samples of each step to ledger.jsonl, for `hvd-train audit`."""
    eval_epochs: int = free(1)
    """Epochs from one evaluation to the next (the last epoch is always evaluated)."""
    tuned: Path | None = free(None)
    """Horovod's settings from this file, as `hvd-train tune` writes it."""
    profile: str | None = free(None)
    """Trace these steps on each rank, into one file of the run folder: 20, or 20:25 (the last one too)."""

    def __post_init__(self) -> None:
        if len(set(self.gpu_ids or ())) < len(self.gpu_ids or ()):
            raise UsageError("--gpu-ids names a GPU twice: each rank has one of its own")
        _at_least("commit-steps", self.commit_steps, 1)
        _positive("commit-seconds", self.commit_seconds)
        _at_least("keep-checkpoints", self.keep_checkpoints, 1)
        _at_least("log-steps", self.log_steps, 1)
        _at_least("eval-epochs", self.eval_epochs, 1)
        _ = self.max_seconds, self.profiled_steps  # raise for what is not a time, or not steps

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds."""
        if self.max_time is None:
            return None
        match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", self.max_time)
        if not match or not any(match.groups()):
            raise UsageError(f"--max-time {self.max_time}: write it as in 2h30m, 90m or 45s")
        hours, minutes, seconds = (float(part or 0) for part in match.groups())
        return hours * 3600 + minutes * 60 + seconds

    @property
    def profiled_steps(self) -> range:
        """`profile` as the numbers of steps, from 1."""
        if self.profile is None:
            return range(0)
        match = re.fullmatch(r"(\d+)(?::(\d+))?", self.profile)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise UsageError(f"--profile {self.profile}: write steps as in 20 or 20:25; the first step is 1")
        if last - first >= _MOST_PROFILED_STEPS:
            raise UsageError(f"--profile {self.profile}: at most {_MOST_PROFILED_STEPS} steps, since a trace is large")
        return range(first, last + 1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A complete run. Raises UsageError when it is made from values that cannot be."""

    recipe: str = "custom"
    """Name of the recipe this started from; it names the run folder."""
    seed: int = 0
    """Decides the initial weights, the order of the samples and every random change to them."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(batch_size=32))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.batch.on_resize == "per-worker" and self.optimizer.lr_scaling == "none":
            raise UsageError("--on-resize per-worker changes the global batch: add --lr-scaling linear or sqrt")
        times, epochs = self.data.repeated_augmentation, self.schedule.epochs
        if epochs % times:
            raise UsageError(
                f"--epochs {epochs} is not a multiple of --repeated-augmentation {times}: some samples would come more "
                f"often than others; type --epochs {-(-epochs // times) * times}"
            )
        _within("seed", self.seed, 0, 2**63)  # what torch.manual_seed takes

    def replace(self, **changes: Any) -> Config:
        """This config with other values for the named fields, whatever group they are in.

        Raises UsageError for a field that does not exist or a value that cannot be.
        """
        owners = _owner_of_each_field()
        by_group: dict[str | None, dict[str, Any]] = {}
        for name, value in changes.items():
            if name not in owners:
                raise unknown_name("setting", name, owners)
            by_group.setdefault(owners[name], {})[name] = value
        own = by_group.pop(None, {})
        groups = {g: dataclasses.replace(getattr(self, g), **values) for g, values in by_group.items() if g}
        return dataclasses.replace(self, **own, **groups)

    def as_dict(self) -> dict[str, Any]:
        """Plain nested values, as they stand in config.yaml and in checkpoints."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    def settings(self) -> dict[str, Any]:
        """Every setting by its name, which no two groups share."""
        owners = _owner_of_each_field()
        return {name: getattr(getattr(self, group) if group else self, name) for name, group in owners.items()}

    def differences(self, other: Config) -> list[str]:
        """`field: mine, not theirs` for each field that decides the result and differs."""
        free, theirs = _free_fields(), other.settings()
        return [
            f"{name}: {_plain(mine)}, not {_plain(theirs[name])}"
            for name, mine in self.settings().items()
            if name not in free and mine != theirs[name]
        ]


GROUPS: dict[str, type[Any]] = {
    "data": DataConfig,
    "model": ModelConfig,
    "batch": BatchConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "precision": PrecisionConfig,
    "run": RunConfig,
}


def from_dict(values: Mapping[str, Any], source: str = "the config") -> Config:
    """The Config that `as_dict` gave. Raises UsageError that names an unknown or ill-typed entry and `source`."""
    try:
        groups = {
            name: GROUPS[name](**_typed_fields(GROUPS[name], _mapping(name, value)))
            for name, value in values.items()
            if name in GROUPS
        }
        own = {name: value for name, value in values.items() if name not in GROUPS}
        return Config(**_typed_fields(Config, own), **groups)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def load(path: Path) -> Config:
    """Read a config.yaml. Raises UsageError where the file is missing, not YAML or not a config."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise UsageError(f"{path} is not a YAML file: {first}") from None
    return from_dict(_mapping(str(path), values), source=str(path))


def dump(config: Config) -> str:
    """The text of a config.yaml that `load` reads back."""
    text: str = yaml.safe_dump(config.as_dict(), sort_keys=False)
    return text


def _owner_of_each_field() -> dict[str, str | None]:
    """Field name to the name of its group (None: Config itself)."""
    owners: dict[str, str | None] = {f.name: None for f in dataclasses.fields(Config) if f.name not in GROUPS}
    owners.update({f.name: group for group, cls in GROUPS.items() for f in dataclasses.fields(cls)})
    return owners


def _free_fields() -> set[str]:
    fields = {f.name for cls in GROUPS.values() for f in dataclasses.fields(cls) if f.metadata.get("free")}
    return fields | {"recipe"}


def _typed_fields(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` as the types of `cls` want them: what YAML cannot express (Path, tuple) is converted."""
    hints = get_type_hints(cls)
    typed = {}
    for name, value in values.items():
        if name not in hints:
            raise unknown_name("setting", str(name), hints)
        typed[name] = _convert(name, value, hints[name])
    return typed


def _convert(name: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(map(str, get_args(hint)))}")
        return value
    if get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(name, item, get_args(hint)[0]) for item in value)
    options = get_args(hint) or (hint,)
    if get_origin(options[0]) is tuple and value is not None:  # of something, or None
        return _convert(name, value, options[0])
    if value is None and type(None) in options:
        return None
    for option in options:
        if option is float and type(value) is int:
            return float(value)
        if option is float and isinstance(value, str):  # YAML reads 1e-3 as text; 1.0e-3 is a number there
            with contextlib.suppress(ValueError):
                return float(value)
        if option is Path and isinstance(value, str):
            return Path(value)
        if isinstance(option, type) and type(value) is option:
            return value
    wanted = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise UsageError(f"{name} is {value!r}; it must be {wanted}")


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must hold settings as `name: value`, not {value!r}")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise UsageError(f"--{name} is {value:g}; it must be at least {least:g}")


def _positive(name: str, value: float | None) -> None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise UsageError(f"--{name} is {value:g}; it must be a number above 0")


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UsageError(f"--{name} is {value:g}; it must be at least 0 and at most 1")


def _within(name: str, value: float, least: float, below: float) -> None:
    if not least <= value < below:
        raise UsageError(f"--{name} is {value:g}; it must be at least {least:g} and below {below:g}")

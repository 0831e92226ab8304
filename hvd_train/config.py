"""The configuration of a run: seven groups of settings, and checks of numbers
and of what goes together.

The text below a field is its flag's help. Field names are unique across the groups, so flags need
no prefix. Every field that is not made with `may_change` must be the same when a run is resumed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hvd_train.errors import UsageError, flag, unknown_name

T = TypeVar("T")
_SCHEDULES = ("constant", "cosine", "linear", "step", "one-cycle")
_TRACKERS = "tensorboard", "wandb", "mlflow"
_OPTIMIZERS = ("sgd", "adam", "adamw", "lars", "lamb")
_RANGES: dict[str, Callable[[float], bool]] = {
    "at least 0": lambda value: value >= 0,
    "at least 1": lambda value: value >= 1,
    "at least 0 and below 1": lambda value: 0 <= value < 1,
    "at least 0 and at most 1": lambda value: 0 <= value <= 1,
    "at least 0 and below 2**63": lambda value: 0 <= value < 2**63,  # what torch.manual_seed takes
    "a number above 0": lambda value: 0 < value < math.inf,
}


def number(default: T, wanted: str) -> T:
    """Return a dataclass field whose value is None or fits `wanted`, a key of _RANGES."""
    value: T = field(default=default, metadata={"wanted": wanted})
    return value


def may_change(default: T, wanted: str = "") -> T:
    """Return a dataclass field that may change when a run is resumed.

    It does not change a step; some, such as `target`, decide which step is the last, or which
    weights are the best.
    """
    value: T = field(default=default, metadata={"may_change": True, "wanted": wanted})
    return value


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How long a run trains, and how the learning rate moves."""

    epochs: int = number(10, "at least 1")
    """Passes over the training set."""
    patience: int | None = may_change(None, "at least 1")
    """Stop when this many epochs in a row have brought no better evaluation."""
    target: str | None = may_change(None)
    """Stop after the evaluation in which a figure is as good as this: NAME=VALUE,
    as in --target loss=0.1 or top1=0.75"""
    best_by: str | None = None
    """What makes an evaluation the best one: loss (the lowest), or by default the task's
    figure (the highest top1)."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: constant, cosine (a half one), linear, step, one-cycle
    (30% warm-up), or package.module:function of the epochs done, which returns the share of
    the peak learning rate."""
    final_factor: float = number(0.0, "at least 0 and at most 1")
    """The share of the peak learning rate at which --schedule cosine and linear end."""
    warmup_epochs: float = number(0.0, "at least 0")
    """Epochs (fractions allowed) over which the learning rate rises linearly from 0."""
    decay_epochs: tuple[float, ...] = (30, 60, 80)
    """Epochs at which --schedule step multiplies the learning rate by `decay-factor`."""
    decay_factor: float = number(0.1, "a number above 0")
    """What --schedule step multiplies the learning rate by at each of `decay-epochs`."""

    def __post_init__(self) -> None:
        if ":" not in self.schedule and self.schedule not in _SCHEDULES:
            raise unknown_name("schedule", self.schedule, _SCHEDULES)
        if self.target is not None and not re.fullmatch(
            r"[^\W\d]\w*=[-+]?[0-9.]*[0-9](e[-+]?[0-9]+)?", self.target
        ):
            raise UsageError(
                f"--target {self.target}: type NAME=VALUE, a figure of the task and a number"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images, their source and their transforms."""

    data: str = "digits"
    """Data set: digits, cifar10, cifar100, folder, synthetic, hf:FOLDER (of Hugging Face's
    `datasets`), shards:URL (tar files or MDS), or your own as package.module:function."""
    data_dir: Path | None = may_change(None)
    """Folder of the data; for `folder` it holds train/ and val/, with one folder per class."""
    cache_dir: Path | None = may_change(None)
    """Folder of this host's copies of shards, which its workers share; default:
    ~/.cache/hvd_train."""
    cache_size: str | None = may_change(None)
    """How much of shards:URL is kept on a host, as in 500GB; default: until a tenth of the
    disk is left; 0: nothing."""
    data_timeout: float = may_change(600.0, "a number above 0")
    """Seconds that ranks wait if the store of shards fails; then the job commits and ends."""
    download: bool = may_change(False)
    """Fetch the data set into the data folder if it is not there (cifar10, cifar100)."""
    image_size: int | None = number(None, "at least 1")
    """Side of the square images the model sees, in pixels; default: the data set's own size."""
    val_crop_size: int | None = number(None, "at least 1")
    """Side of the square crop that evaluation sees, in pixels, for
    `folder`; default: image-size."""
    val_resize_size: int | None = number(None, "at least 1")
    """Length of an image's shorter side before that crop, in pixels, for `folder`;
    default: 256/224 of the crop."""
    max_image_pixels: int = may_change(90_000_000, "at least 1")
    """Pixels of the largest image that is decoded, for `folder` and hf:; decoding takes
    up to 25 bytes a pixel."""
    augment: Literal["standard", "trivial", "rand", "none"] = "standard"
    """Random changes to images: what is usual for the data set; for `folder` also
    TrivialAugment or RandAugment."""
    random_erasing: float = number(0.0, "at least 0 and at most 1")
    """Probability that a rectangle of a training image is blanked, for `folder`."""
    mixup: float = number(0.0, "at least 0")
    """Blend the images of a micro-batch in pairs, with shares drawn from Beta(mixup,
    mixup); 0 turns it off."""
    cutmix: float = number(0.0, "at least 0")
    """Paste a rectangle of another image into each, its area from Beta(cutmix, cutmix);
    or mixup if both are on."""
    workers: int | None = may_change(None, "at least 0")
    """Loader processes per rank, for files (0: the training process); default: one
    for each core, at most 4."""
    synthetic_samples: int = number(2048, "at least 1")
    """Number of training images of the `synthetic` data set."""
    synthetic_classes: int = number(1000, "at least 1")
    """Number of classes of the `synthetic` data set."""

    def __post_init__(self) -> None:
        if (self.val_resize_size or math.inf) < (self.val_crop_size or 1):
            raise UsageError(
                f"--val-resize-size is {self.val_resize_size}; it must be at least "
                f"{self.val_crop_size}"
            )
        if not self.has_files and (self.val_crop_size or self.val_resize_size):
            raise UsageError(
                f"--val-crop-size and --val-resize-size go with --data folder, not with {self.data}"
            )
        if self.data == "folder" and self.data_dir is None:
            raise UsageError(
                "--data folder needs --data-dir: the folder that holds train/ and val/"
            )

    @property
    def has_files(self) -> bool:
        """Whether images are files of any size, which are cropped as they are read."""
        return self.data == "folder" or self.data.startswith("shards:")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network, what it starts from, and which parameters are trained."""

    model: str = "digits-convnet"
    """A torchvision classifier by name, timm:NAME, digits-convnet, or your own as
    package.module:function."""
    task: str = "classification"
    """What is computed for samples: classification, regression, multi-label, segmentation,
    language-model, or your own as package.module:function, which returns a Task."""
    weights: str | None = None
    """Weights to start from: torchvision's by name (DEFAULT, IMAGENET1K_V2; their normalisation is
    used, too), or a file: a state_dict, also in a checkpoint, or .safetensors. A last layer for
    other classes is not loaded."""
    freeze: str = "none"
    """Parameters that are not trained: none, backbone (all but the last layer, or those of all
    heads), or names, as in layer[12].*"""
    sync_batch_norm: bool = False
    """Batch norm over the samples of all workers, instead of each micro-batch."""
    unfreeze: tuple[str, ...] = ()
    """Train frozen parameters after this many epochs: EPOCH:NAMES, as in
    --unfreeze 5:layer4.* 10:*"""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The samples of a step, and how the workers share them."""

    batch_size: int | None = number(None, "at least 1")
    """Samples per worker in one forward pass (and the group that batch norm normalises
    over); default: 16 to 48."""
    global_batch_size: int | None = number(None, "at least 1")
    """Samples per optimizer step over all workers; default: batch size x accumulation steps
    x workers at the start."""
    accumulation_steps: int = number(1, "at least 1")
    """Forward passes per worker and optimizer step; a global batch size and the
    number of workers decide it."""
    eval_batch_size: int = number(256, "at least 1")
    """Samples per worker in one forward pass of an evaluation."""
    on_resize: Literal["global", "per-worker"] = "global"
    """When workers come or go: keep the global batch, or the batch per worker (the
    learning rate follows)."""
    order: Literal["shuffled", "in-order"] = "shuffled"
    """Order of the samples in an epoch: another one each time, or as they are stored."""
    shuffle_window: int = number(10_000, "at least 0")
    """Samples of shards that are shuffled with each other for a micro-batch, in an order that reads
    few shards at a time; 0: all, in any order of shards."""
    sample_weights: str | None = None
    """Draw samples with a probability in proportion to their weight: a .npy file, a text file with
    a number a line, or the name of an attribute of the training set."""
    length_buckets: str | None = None
    """Put samples of similar length into a micro-batch, by a file or attribute of lengths, as with
    sample-weights."""
    drop_last: bool = False
    """Leave out the last samples of an epoch's order that do not fill a global batch."""

    def __post_init__(self) -> None:
        if self.batch_size is None and self.global_batch_size is None:
            raise UsageError("no batch size: give --batch-size (per worker) or --global-batch-size")
        orders = [
            flag(name)
            for name in ("order", "sample_weights", "length_buckets")
            if getattr(self, name) not in (None, "shuffled")
        ]
        if len(orders) > 1:
            raise UsageError(f"{' and '.join(orders)} are different orders: leave one out")
        at_once = self.batch_size and self.batch_size * self.accumulation_steps
        if (
            self.global_batch_size
            and at_once
            and self.accumulation_steps > 1
            and self.global_batch_size % at_once
        ):
            raise UsageError(
                f"--global-batch-size must be a multiple of {at_once}, or leave out "
                "--accumulation-steps"
            )
        if self.on_resize == "per-worker" and self.global_batch_size is not None:
            raise UsageError(
                "--on-resize per-worker needs --batch-size (per worker), "
                "without --global-batch-size"
            )
        if self.on_resize == "per-worker" and self.drop_last:
            raise UsageError(
                "--drop-last needs --on-resize global, which keeps the number "
                "of samples of an epoch"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How a gradient changes the weights."""

    optimizer: str = "sgd"
    """sgd, adam, adamw, timm's lars or lamb for large batches, or package.module:Class,
    such as torch.optim:RAdam."""
    optimizer_args: tuple[str, ...] = ()
    """More arguments of the optimizer, NAME=VALUE: --optimizer-args betas=0.9,0.95 eps=1e-6"""
    learning_rate: float = number(0.1, "a number above 0")
    """Peak learning rate, for a global batch of `lr-base-batch` if it is scaled."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows the global batch: not at all, in proportion,
    or with its square root."""
    lr_base_batch: int = number(256, "at least 1")
    """The global batch for which `learning-rate` was chosen (with --lr-scaling linear or sqrt)."""
    momentum: float = number(0.9, "at least 0 and below 1")
    """Momentum of SGD and LARS."""
    nesterov: bool = False
    """Use Nesterov momentum, with sgd or lars."""
    weight_decay: float = number(5e-4, "at least 0")
    """Strength of the weight decay."""
    decay_of: Literal["all", "weights"] = "all"
    """What weight decay applies to: all parameters, or all but biases and normalisation layers."""
    label_smoothing: float = number(0.0, "at least 0 and below 1")
    """Share of the target spread evenly over all classes, from 0 to below 1."""
    clip_norm: float | None = number(None, "a number above 0")
    """Largest 2-norm of the whole gradient; a larger gradient is scaled down to it."""
    ema_decay: float | None = number(None, "at least 0 and below 1")
    """Evaluate and keep a moving average of weights: `ema-decay` (say 0.999) of it plus
    the rest of the new ones."""

    def __post_init__(self) -> None:
        if ":" not in self.optimizer and self.optimizer not in _OPTIMIZERS:
            raise unknown_name("optimizer", self.optimizer, _OPTIMIZERS)
        if wrong := [
            each for each in self.optimizer_args if not re.fullmatch(r"[^\W\d]\w*=.+", each)
        ]:
            raise UsageError(f"--optimizer-args {wrong[0]}: type NAME=VALUE, as in eps=1e-6")
        if self.nesterov and (self.optimizer not in ("sgd", "lars") or self.momentum == 0):
            raise UsageError(
                "--nesterov needs --optimizer sgd or lars with a momentum above "
                "0, else --no-nesterov"
            )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of the arithmetic and of what travels between workers."""

    precision: Literal["auto", "fp32", "fp16", "bf16"] = "fp32"
    """Arithmetic of the forward and backward passes: fp16 (with loss scaling) and
    bf16 are mixed precision; auto: fp16 on GPUs, fp32 on CPUs."""
    compression: Literal["auto", "none", "fp16", "bf16"] = "auto"
    """Format of gradients on the wire: fp16 (with loss scaling), bf16, or none; auto: fp16
    on GPUs, none on CPUs."""
    channels_last: Literal["auto", "on", "off"] = "auto"
    """Keep the channels innermost in memory; auto: for mixed precision on GPUs, and on CPUs for
    a model by name, such as a MobileNet, that is faster with it; not in a Session."""
    compile: bool = False
    """Compile the model with torch.compile: faster steps after a start of a minute or more."""
    deterministic: bool = False
    """Use only deterministic operations on a GPU; slower. CPUs always use them."""
    reduction: Literal["fast", "exact"] = "fast"
    """How gradients are added up: exact as 64-bit integers, which gives the same bits on any
    number of workers, and sends 8 bytes for each parameter."""
    threads: int | None = number(None, "at least 1")
    """Threads of a worker on a CPU; default: its share of the host's cores, or 1 with --reduction
    exact, since the last bits of a gradient depend on it."""

    def __post_init__(self) -> None:
        if self.reduction == "exact" and self.compression in ("fp16", "bf16"):
            raise UsageError(
                f"--reduction exact sends integers: leave out --compression {self.compression}"
            )

    @property
    def is_exact(self) -> bool:
        """Whether the result has the same bits on any number of workers."""
        return self.reduction == "exact"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Devices, output, commits and time of a run."""

    device: Literal["auto", "cpu", "cuda"] = may_change("auto")
    """Device of the model; auto: a GPU per rank if there is one."""
    output_dir: Path | None = may_change(None)
    """Run folder; default: the stopped run of the same command, else runs/RECIPE-TIME.
    s3://BUCKET/RUN is short for --output-dir runs/s3/BUCKET/RUN --copy-to s3://BUCKET/RUN."""
    copy_to: str | None = may_change(None)
    """Also keep the run folder at this URL (s3://..., gs://... or another of fsspec): copied after
    each commit, and fetched where --output-dir has no run yet."""
    resume: str = may_change("auto")
    """auto: resume from the newest good checkpoint of the run folder; never: start again; or a
    checkpoint file, or the folder of another run, from which a new run continues: with other
    settings, or for more epochs."""
    commit_steps: int | None = may_change(None, "at least 1")
    """Steps from one checkpoint to the next."""
    commit_seconds: float | None = may_change(60.0, "a number above 0")
    """Write a checkpoint when the last one is this many seconds old."""
    weights_format: Literal["pt", "safetensors"] = may_change("pt")
    """safetensors: also write the best and the final weights in that format, in addition to .pt."""
    keep_checkpoints: int | str = may_change(3)
    """Number of the newest checkpoints to keep; one, if the disk is full. 3,every=1000 also keeps
    the first one at or after each 1000 steps."""
    log_steps: int = may_change(10, "at least 1")
    """Steps from one line of metrics to the next."""
    balance: Literal["auto", "on", "off"] = may_change("auto")
    """Deal the micro-batches of a step to workers by their measured speed (auto: if they have
    different GPUs or processors), which does not change the result."""
    recheck_steps: int | None = may_change(None, "at least 0")
    """Steps from one in which each worker computes a micro-batch of another one again, and all
    compare the gradients, to the next; also steps 1, 10 and 100 after each start. Default: 500; in
    a loop of your own never, as with 0, which also omits the check of each device at the start."""
    max_time: str | None = may_change(None)
    """End the run after this time of training (without start-ups, over all restarts), as in 2h30m,
    90m or 45s: with final weights, test score and summary. A longer time continues the run."""
    log_to: str = may_change("tensorboard")
    """Where values go besides metrics.jsonl: tensorboard, wandb or mlflow, several with
    commas, or none."""
    ledger: bool = may_change(False)
    """Write samples, loss, gradient norm and a digest of each step to ledger.jsonl, for `hvd-train
    audit`, `replay` and `diff`."""
    eval_epochs: int = may_change(1, "at least 1")
    """Epochs from one evaluation to the next (the last epoch is always evaluated)."""
    profile: str | None = may_change(None)
    """Trace these steps on all ranks, into files of the run folder: 20, or
    20:25 (both included)."""

    def __post_init__(self) -> None:
        # may raise
        _ = self.max_seconds, self.profiled_steps, self.trackers, self.checkpoints_to_keep
        if self.copy_to and not self.output_dir:
            raise UsageError(
                f"--copy-to {self.copy_to}: name a folder of this machine, too: --output-dir FOLDER"
            )
        if url := re.match(r"(\w+):/(.+)", str(self.output_dir)):  # a Path has one slash less
            if self.copy_to or url[1] == "file" or ".." in url[2].split("/"):
                raise UsageError(
                    f"--output-dir {self.output_dir}: type a folder, or a URL as in s3://BUCKET/RUN"
                )
            object.__setattr__(self, "copy_to", f"{url[1]}://{url[2]}")
            object.__setattr__(self, "output_dir", Path("runs", url[1], url[2]))

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in `log_to`. Raises UsageError for an unknown one."""
        names = (
            () if self.log_to == "none" else tuple(name.strip() for name in self.log_to.split(","))
        )
        for name in names:
            if name not in _TRACKERS:
                raise unknown_name(
                    "value of --log-to", name, _TRACKERS if len(names) > 1 else (*_TRACKERS, "none")
                )
        return names

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds, or None. Raises UsageError if it is no time."""
        if self.max_time is None:
            return None
        match = re.fullmatch(
            "".join(rf"(?:([0-9]+|[0-9]*\.[0-9]+){unit})?" for unit in "hms"), self.max_time
        )
        if not match or not any(match.groups()):
            raise UsageError(
                f"--max-time {self.max_time}: write it with its units, as in "
                "2h30m, 1.5h, 90m or 45s"
            )
        hours, minutes, seconds = (float(part or 0) for part in match.groups())
        return hours * 3600 + minutes * 60 + seconds

    @property
    def profiled_steps(self) -> range:
        """Numbers of the steps to trace, from 1; empty without `profile`.

        Raises UsageError if it names no steps.
        """
        return range(0) if self.profile is None else steps_in("--profile", self.profile)

    @property
    def checkpoints_to_keep(self) -> tuple[int, int]:
        """Number of the newest checkpoints, and steps from one that stays to the next; 0: none.

        Raises UsageError if `keep_checkpoints` is something else.
        """
        text = str(self.keep_checkpoints)
        match = re.fullmatch(r"([1-9][0-9]{0,17})(?:,every=([1-9][0-9]{0,17}))?", text)
        if match is None:
            raise UsageError(
                f"--keep-checkpoints {text}: type a number from 1 on, as in 3 or 3,every=1000"
            )
        return int(match[1]), int(match[2] or 0)


def steps_in(flag: str, text: str) -> range:
    """Return the steps in a text such as 20 or 20:25, whose last one is included.

    Raises UsageError, which names the flag.
    """
    match = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,18}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UsageError(f"{flag} {text}: write steps as in 20 or 20:25; the first step is 1")
    return range(first, last + 1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A complete run. Raises UsageError if a value, or two values together, cannot be."""

    recipe: str = "custom"
    """The recipe to start from; it names the run folder. A script's own run
    has the script's name."""
    seed: int = number(0, "at least 0 and below 2**63")
    """Decides the initial weights, the order of the samples and every random change to them."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(batch_size=32))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    run: RunConfig = field(default_factory=RunConfig)
    # settings that a script got or sets
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, value in self.settings().items():
            wanted = _FIELDS[name].metadata.get("wanted")
            if wanted and value is not None and not _RANGES[wanted](value):
                raise UsageError(f"{flag(name)} is {value:g}; it must be {wanted}")
        needs_single_passes = {
            "--balance on": self.run.balance == "on",
            "--reduction exact": self.precision.is_exact,
            "--recheck-steps": self.run.recheck_steps,
        }
        for chosen, is_on in needs_single_passes.items():
            if is_on and self.model.sync_batch_norm:
                raise UsageError(
                    f"{chosen}: with --sync-batch-norm a micro-batch depends on the others that "
                    "run at once; leave out one of them"
                )
        if (warmup := self.schedule.warmup_epochs) > self.schedule.epochs:
            raise UsageError(
                f"--warmup-epochs {warmup:g} is more than --epochs {self.schedule.epochs}"
            )

    def replace(self, **changes: Any) -> Config:
        """Return this config with other values for settings of any group; texts become
        numbers or paths, if need be.

        Raises UsageError for a wrong name or value.
        """
        by_group: dict[str | None, dict[str, Any]] = {}
        for name, value in changes.items():
            if name not in _OWNERS:
                raise unknown_name("setting", name, _OWNERS)
            by_group.setdefault(_OWNERS[name], {})[name] = typed(name, value, HINTS[name])
        own = by_group.pop(None, {})
        groups = {
            g: dataclasses.replace(getattr(self, g), **values)
            for g, values in by_group.items()
            if g
        }
        return dataclasses.replace(self, **own, **groups)

    def as_dict(self) -> dict[str, Any]:
        """Return the plain value of every setting by its name, as in
        config.yaml and checkpoints.
        """
        return {name: _plain(value) for name, value in self.settings().items()}

    def settings(self) -> dict[str, Any]:
        """Return the value of every setting by its name."""
        return {
            name: getattr(getattr(self, group) if group else self, name)
            for name, group in _OWNERS.items()
        }

    def differences(self, other: Config) -> list[str]:
        """Return `name: mine, not theirs` for each setting that differs and must not."""
        theirs = other.decisive()
        return [
            f"{name}: {_plain(mine)}, not {_plain(theirs.get(name))}"
            for name, mine in self.decisive().items()
            if mine != theirs.get(name)
        ]

    def decisive(self) -> dict[str, Any]:
        """Return by name the value of every setting that must not change on resume."""
        fixed = {
            name: value
            for name, value in self.settings().items()
            if not _FIELDS[name].metadata.get("may_change")
        }
        if not self.precision.is_exact:
            del fixed["threads"]  # only rounding depends on it
        return fixed


GROUPS: dict[str, type[Any]] = {
    n: hint
    for n, hint in get_type_hints(Config).items()
    if isinstance(hint, type) and hint.__module__ == __name__
}
_CLASSES: tuple[tuple[str | None, type[Any]], ...] = ((None, Config), *GROUPS.items())
_OWNERS = {
    f.name: group
    for group, cls in _CLASSES
    for f in dataclasses.fields(cls)
    if group or f.name not in {*GROUPS, "given"}
}
"""The group of each field; None stands for Config itself."""
_FIELDS = {f.name: f for _, cls in _CLASSES for f in dataclasses.fields(cls)}
HINTS: dict[str, Any] = {n: hint for _, cls in _CLASSES for n, hint in get_type_hints(cls).items()}
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    NoneType: "none",
}


def config_of(config: Config | None) -> Config:
    """Return the config that a program gives, by default `Config()`.

    Raises UsageError for another object, such as both results of `parse_args`.
    """
    if not isinstance(config, Config | None):
        raise UsageError(
            f"config is a {type(config).__name__}: give a Config, such as the second result of "
            "hvd_train.parse_args()"
        )
    return config or Config()


def typed(name: str, value: Any, hint: Any) -> Any:
    """Return a value with the type of its setting: the command line and YAML have texts
    and lists for some types.

    Raises UsageError if that is impossible.
    """
    options = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    if isinstance(value, str) and value.lower() == "none":
        value = None if NoneType in options else "none"
    for option in options:
        if get_origin(option) is Literal:
            if value in get_args(option):
                return value
        elif get_origin(option) is tuple:
            if isinstance(value, (list, tuple)):
                return tuple(typed(name, item, get_args(option)[0]) for item in value)
        elif isinstance(value, option) and (option is bool or not isinstance(value, bool)):
            return value
        elif (option in (int, float, Path) and isinstance(value, str)) or (
            option is float and type(value) is int
        ):
            with suppress(ValueError, OverflowError):
                return option(value)
    one_of = f"one of {', '.join(get_args(hint))}" if get_origin(hint) is Literal else None
    wanted = one_of or " or ".join(_WORDS.get(option, "a list") for option in options)
    raise UsageError(f"{flag(name)} is {value!r}; it must be {wanted}")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value

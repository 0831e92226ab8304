"""The whole configuration of a run: one group of settings beside another, and what holds between the groups.

Field names are unique across the groups, so that a flag needs no prefix (`--epochs`) and
`config.replace(epochs=5)` needs no path. A field made with `settings.fields.free` may change when a run is resumed;
every other one decides the result, so a run folder belongs to one value of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_train import remote_url
from hvd_train.errors import UsageError, unknown_name
from hvd_train.plugin import OWN
from hvd_train.settings.batch import BatchConfig
from hvd_train.settings.data import DataConfig
from hvd_train.settings.fields import within
from hvd_train.settings.model import ModelConfig
from hvd_train.settings.optimizer import OptimizerConfig
from hvd_train.settings.precision import PrecisionConfig
from hvd_train.settings.run import RunConfig
from hvd_train.settings.schedule import ScheduleConfig
from hvd_train.settings.task import TaskConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """A complete run. Making one raises UsageError where a value, or two values together, cannot be."""

    recipe: str = "custom"
    """Recipe that this starts from, as if its name came first; it names the run folder."""
    seed: int = 0
    """Decides the initial weights, the order of the samples and every random change to them."""
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(batch_size=32))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.batch.on_resize == "per-worker" and self.optimizer.lr_scaling == "none":
            raise UsageError("--on-resize per-worker changes the global batch: add --lr-scaling linear or sqrt")
        if self.model.sync_batch_norm and self.run.rechecked_every:
            raise UsageError(
                "--recheck-steps has each rank compute a slot by itself, and with --sync-batch-norm no rank can: leave "
                "one of them out"
            )
        if self.data.decode == "gpu" and self.run.device == "cpu":
            raise UsageError("--decode gpu needs a GPU: leave out --device cpu, or type --decode cpu")
        if self.schedule.min_learning_rate > self.optimizer.learning_rate:
            least, peak = self.schedule.min_learning_rate, self.optimizer.learning_rate
            raise UsageError(
                f"--min-learning-rate {least:g} is above --learning-rate {peak:g}, which it is to fall from"
            )
        times, epochs = self.data.repeated_augmentation, self.schedule.epochs
        if epochs % times:
            raise UsageError(
                f"--epochs {epochs} is not a multiple of --repeated-augmentation {times}: some samples would come more "
                f"often than others; type --epochs {-(-epochs // times) * times}"
            )
        within("seed", self.seed, 0, 2**63)  # what torch.manual_seed takes

    def replace(self, **changes: Any) -> Config:
        """Return this config with other values for the named fields, whatever group they are in.

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

    @property
    def is_of_program(self) -> bool:
        """Whether model, data and task are objects of a program, which alone knows them."""
        return {self.model.model, self.data.data, self.task.task} == {OWN}

    def as_dict(self) -> dict[str, Any]:
        """Return all settings as plain nested values, as they stand in config.yaml and in checkpoints."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    def settings(self) -> dict[str, Any]:
        """Return the value of every setting by the setting's name, which no two groups share."""
        owners = _owner_of_each_field()
        return {name: getattr(getattr(self, group) if group else self, name) for name, group in owners.items()}

    def differences(self, other: Config, *, but: Collection[str] = ()) -> list[str]:
        """Return `name: mine, not theirs` for each setting that decides the result and differs in the other config.

        The settings named in `but` are left out.
        """
        free, theirs = free_fields() | set(but), other.settings()
        return [
            f"{name}: {_plain(mine)}, not {_plain(theirs[name])}"
            for name, mine in self.settings().items()
            if name not in free and _decides(name, mine) != _decides(name, theirs[name])
        ]


GROUPS: dict[str, type[Any]] = {
    "data": DataConfig,
    "task": TaskConfig,
    "model": ModelConfig,
    "batch": BatchConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "precision": PrecisionConfig,
    "run": RunConfig,
}


def _owner_of_each_field() -> dict[str, str | None]:
    """Return the name of the group of each field; None stands for Config itself."""
    owners: dict[str, str | None] = {f.name: None for f in dataclasses.fields(Config) if f.name not in GROUPS}
    owners.update({f.name: group for group, cls in GROUPS.items() for f in dataclasses.fields(cls)})
    return owners


def free_fields() -> set[str]:
    """Return the names of the fields that may differ when a run is resumed."""
    fields = {f.name for cls in GROUPS.values() for f in dataclasses.fields(cls) if f.metadata.get("free")}
    return fields | {"recipe"}


def _decides(name: str, value: Any) -> Any:
    """Return what of a setting decides the result: that images are kept does, not where."""
    if name == "cache":
        return value != "none"
    if name == "best_by":  # top1 is what runs of old have where they were not told
        return "auto" if value == "top1" else value
    return value


def _plain(value: Any) -> Any:
    """Return a value as YAML and JSON know it: a tuple as a list, a path as text, and so inside of dicts."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return remote_url.as_typed(value) if isinstance(value, Path) else value

"""The whole configuration of a run: the groups of settings, and checks across groups.

Field names are unique across the groups, so flags (`--epochs`) and `config.replace(epochs=5)` need no prefix. Every
field that is not made with `settings.free` decides the result, so it must not change when a run is resumed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from hvd_train.errors import UsageError, unknown_name
from hvd_train.settings import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A complete run. Raises UsageError if a value, or two values together, cannot be."""

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
        if not 0 <= self.seed < 2**63:  # what torch.manual_seed takes
            raise UsageError(f"--seed is {self.seed}; it must be at least 0 and below 2**63")

    def replace(self, **changes: Any) -> Config:
        """Return this config with other values for fields of any group. Raises UsageError for a wrong name or value."""
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
        """Return all settings as plain nested values, as in config.yaml and checkpoints."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    def settings(self) -> dict[str, Any]:
        """Return the value of every setting by its name."""
        owners = _owner_of_each_field()
        return {name: getattr(getattr(self, group) if group else self, name) for name, group in owners.items()}

    def differences(self, other: Config) -> list[str]:
        """Return `name: mine, not theirs` for each setting that differs and decides the result."""
        theirs = other.settings()
        free = {f.name for cls in GROUPS.values() for f in dataclasses.fields(cls) if f.metadata.get("free")}
        return [
            f"{name}: {_plain(mine)}, not {_plain(theirs[name])}"
            for name, mine in self.settings().items()
            if name not in free and name != "recipe" and mine != theirs[name]
        ]


GROUPS: dict[str, type[Any]] = {n: hint for n, hint in get_type_hints(Config).items() if hint not in (int, str)}


def _owner_of_each_field() -> dict[str, str | None]:
    """Return the name of the group of each field; None stands for Config itself."""
    owners: dict[str, str | None] = {f.name: None for f in dataclasses.fields(Config) if f.name not in GROUPS}
    owners.update({f.name: group for group, cls in GROUPS.items() for f in dataclasses.fields(cls)})
    return owners


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value

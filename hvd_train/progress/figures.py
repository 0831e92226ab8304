"""What a task measures, as people read it: names, titles, and how a number comes out of sums over samples."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hvd_train.errors import UsageError

if TYPE_CHECKING:  # who only watches a run has no threads of numpy, which would take its signals
    import numpy as np
    import numpy.typing as npt

Sums: TypeAlias = "Mapping[str, npt.NDArray[np.float64]]"
"""By the name of each measure, its sum over samples: an array of the shape that the measure has for one sample."""


@dataclass(frozen=True)
class Shown:
    """How a figure is called and written."""

    name: str
    """Its key in metrics.jsonl and summary.json; on the validation set `val_` stands before it."""
    title: str
    """What it is called where people read it."""
    better: Literal["higher", "lower"] | None = None
    """In which direction it is better; None: it has no order, and decides about no weights."""
    form: str = ".4f"
    """How it is written, as Python's `format` takes it: `.2%` for a share of 1."""

    def written(self, value: float) -> str:
        """Return a value as people read it."""
        return format(value, self.form)

    def is_better(self, value: float, other: float) -> bool:
        """Return whether a value is better than another one, or that one is not a number; an equal one is not."""
        if other != other:
            return value == value
        return value > other if self.better == "higher" else value < other

    def reached(self, value: float, aim: float) -> bool:
        """Return whether a value is as good as an aim."""
        return value >= aim if self.better == "higher" else value <= aim

    def as_shown(self) -> Shown:
        """Return these facts alone, which can be pickled: what computes a figure may be a function of a task."""
        return Shown(self.name, self.title, self.better, self.form)

    def plain(self) -> dict[str, str | None]:
        """Return these facts as plain values for JSON."""
        return {name: getattr(self, name) for name in ("name", "title", "better", "form")}


@dataclass(frozen=True)
class Figure(Shown):
    """A number that a task reports: a function of sums over samples and of their count."""

    value: Callable[[Sums, int], float] = dataclasses.field(default=lambda sums, count: float("nan"), kw_only=True)
    """Returns the number, given the sums of all measures and the number of samples, which is at least 1."""
    in_training: bool = dataclasses.field(default=True, kw_only=True)
    """Whether it is known while training, and not in evaluations alone."""


def mean(
    name: str, title: str | None = None, better: Literal["higher", "lower"] | None = None, form: str = ".4f"
) -> Figure:
    """Return the figure that is the mean of the measure of this name over samples, and over whatever else it counts."""
    return Figure(name, title or name, better, form, value=lambda sums, count: float(sums[name].mean()) / count)


LOSS = mean("loss", better="lower")
OF_CLASSES = (
    Shown("loss", "loss", "lower"),
    Shown("top1", "top-1", "higher", ".2%"),
    Shown("top5", "top-5", "higher", ".2%"),
)
"""The figures of classification, and of every run that was written before there were other tasks."""


def by_name(figures: Sequence[Shown], name: Any) -> Shown:
    """Return the figure of this name that can decide which epoch is the best; else the first that can."""
    ordered = [figure for figure in figures if figure.better is not None] or [OF_CLASSES[0]]
    usual = next((figure for figure in ordered if figure.name == "top1"), ordered[0])  # as in runs of old
    return next((figure for figure in ordered if figure.name == name), usual)


def read_all(values: Any) -> tuple[Shown, ...]:
    """Return the figures that `Shown.plain` has written; those of classification where there are none to be read."""
    found = []
    for value in values[:_MOST] if isinstance(values, list) else ():
        facts = value if isinstance(value, dict) else {}
        name, title, form = (facts.get(key, "") for key in ("name", "title", "form"))
        figure = Shown(name, title, facts.get("better"), form)
        if _why_unreadable(figure):
            return OF_CLASSES
        found.append(figure)
    return tuple(found) or OF_CLASSES


def _why_unreadable(figure: Shown) -> str | None:
    """Return what is wrong with the facts of a figure, so that readers of runs would not take them; else None."""
    for what, text in (("name", figure.name), ("title", figure.title), ("form", figure.form)):
        if not isinstance(text, str) or len(text) > _LONGEST:
            return f"its {what} must be a text of at most {_LONGEST} letters"
    if figure.better not in ("higher", "lower", None):
        return f"better={figure.better!r} must be 'higher', 'lower' or None"
    if not _FORM.fullmatch(figure.form):
        return f"form={figure.form!r} must be as in '.4f', '.2%', ',.1f' or '.3g'"
    return None


_FORM = re.compile(r",?(\.[0-9]{1,2})?[%efg]")
_MOST, _LONGEST = 64, 64  # of the figures in a file, which anybody may have written, and of the letters of a text

_TAKEN = {
    *("count", "elapsed", "epoch", "gradient_norm", "images_per_second", "kind", "learning_rate", "loss_scale"),
    *("samples", "skipped_steps", "split", "ranks", "step", "time", "per_class"),
    *(
        "epoch_share",
        "epochs",
        "finished",
        "recipe",
        "run_dir",
        "saved",
        "seconds",
        "steps",
    ),  # these and the next: summary.json
    *("peak_gpu_memory", "peak_memory", "stopped_by", "torch", "total_seconds", "usage", "why", "world_size"),
}
_BEFORE = ("val_", "test_", "best_")


def check(figures: Iterable[Figure]) -> None:
    """Raise UsageError for figures that no run could hold: of names that others have, or of unknown forms."""
    seen = set[str]()
    for figure in figures:
        name = figure.name
        if not name.isidentifier():
            raise UsageError(f"a figure of the task is called {name!r}: write it as a name in Python, as in mean_error")
        if name in _TAKEN or name.startswith(_BEFORE):
            raise UsageError(f"a figure of the task is called {name!r}, which records use already: choose another name")
        if why := _why_unreadable(figure):
            raise UsageError(f"the figure {name} of the task: {why}")
        if name in seen:
            raise UsageError(f"two figures of the task are called {name!r}: each needs a name of its own")
        seen.add(name)

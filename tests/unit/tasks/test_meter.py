"""Sums of what a task measures, and figures of them, as plain numbers."""

from __future__ import annotations

import math

import numpy as np
import torch

from hvd_train.progress.figures import Figure
from hvd_train.progress.metrics import Totals
from hvd_train.tasks.meter import Meter
from hvd_train.tasks.task import Task


def meter_of(*figures: Figure) -> Meter:
    """Return the meter of a task that measures hits, two of each sample."""
    task = Task(
        loss=lambda outputs, targets: (outputs - targets).square(),
        measures=lambda outputs, targets: {"hits": torch.stack([outputs > 0, outputs > 1], dim=1)},
        figures=figures,
    )
    return Meter.of(task, torch.zeros(2), torch.zeros(2), 2)


def test_figures_are_plain_floats() -> None:
    """Checkpoints, which are loaded without running code, hold those of the last step and epoch."""
    meter = meter_of(
        Figure("root", "root", value=lambda sums, count: np.sqrt(sums["hits"].sum())),
        Figure("first", "first", value=lambda sums, count: sums["hits"][0] / count),
    )
    found = meter.figures(Totals((3.0, 4.0, 5.0), 2))
    assert found == {"loss": 1.5, "root": 3.0, "first": 2.0}
    assert {type(value) for value in found.values()} == {float}


def test_a_share_of_nothing_is_not_known() -> None:
    """A figure that divides by what was not met yet is NaN, and no error in the middle of a training."""
    meter = meter_of(Figure("share", "share", value=lambda sums, count: 1.0 / int(sums["hits"][1])))
    assert math.isnan(meter.figures(Totals((3.0, 4.0, 0.0), 2))["share"])


def test_a_row_holds_measures_side_by_side() -> None:
    """The sum of the losses first, then those of each measure, which come back in their shapes."""
    meter = meter_of()
    outputs = torch.tensor([0.5, 2.0, -1.0])
    row = meter.sums(meter.losses(outputs, torch.zeros(3), 3), outputs, torch.zeros(3))
    assert row.tolist() == [0.25 + 4 + 1, 2, 1]
    assert meter.training.read(row.tolist())["hits"].tolist() == [2, 1]

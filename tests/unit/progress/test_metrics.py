"""Exact sums of what a task measures."""

from __future__ import annotations

from hvd_train.progress.metrics import Totals
from tests.support.tasks import meter_of_classes


def test_totals_add() -> None:
    """Each sum by itself, and the samples; with nothing added up yet the others stay."""
    total = Totals((1.0, 1, 1), 2) + Totals((8.0, 1, 0), 4)
    assert total == Totals((9.0, 2, 1), 6)
    assert (total.loss, Totals().loss) == (9.0, 0.0)
    assert Totals() + total == total + Totals() == total


def test_totals_in_a_checkpoint_of_old() -> None:
    """It has the hits at the first place and at the first five by name; more steps of the epoch add up with them."""
    old = Totals.read({"loss": 3.0, "top1": 2.0, "top5": 5.0, "count": 6})
    for classes in (("a", "b"), tuple("abcdefgh")):
        meter = meter_of_classes(classes)
        total = old + Totals((1.0,) * meter.training.size, 2)
        assert meter.figures(total) == {"loss": 4 / 8, "top1": 3 / 8, "top5": 10 / 8}

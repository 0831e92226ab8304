"""The names under which metrics are kept on disk."""

from __future__ import annotations

import pytest

from hvd_train.run_files.records import EpochRecord, StepRecord, numbers_of


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            StepRecord,
            "epoch step samples loss top1 top5 learning_rate gradient_norm loss_scale skipped_steps images_per_second "
            "split",
        ),
        (EpochRecord, "epoch step loss top1 top5 val_loss val_top1 val_top5 images_per_second"),
    ],
)
def test_the_fields_are_those_of_earlier_versions(kind: type[StepRecord | EpochRecord], names: str) -> None:
    """They stand in metrics.jsonl and in checkpoints: a run of an earlier version is resumed and shown by them."""
    earlier = {name: number for number, name in enumerate(names.split())}
    record = kind.read(earlier)
    assert [item for item in record.line().items() if item[1] is not None] == [*earlier.items()]
    assert kind.read(vars(record)) == record, "as checkpoints have it now"


def test_the_ranks_are_plotted_by_the_slowest_and_how_far_it_is_behind() -> None:
    """Two numbers of each logged step, however many ranks there are; none of one rank, or of what is no number."""
    line = {"kind": "step", "step": 3, "time": 1.0, "epoch": 1, "loss": 0.5}
    numbers = numbers_of({**line, "ranks": {"work": [0.01, 0.02, 0.05, 7], "data": [0.0, 0.0, 0.0, 0]}})
    assert numbers is not None
    assert numbers.values == {"train/loss": 0.5, "ranks/slowest": 7, "ranks/spread": 2.5}
    for ranks in (None, {}, "nonsense", {"work": [0, 0, 0, 0]}, {"work": [1, 2]}, {"work": [None] * 4}):
        other = numbers_of({**line, "ranks": ranks})
        assert other is not None
        assert other.values == {"train/loss": 0.5}

"""The names under which metrics are kept on disk."""

from __future__ import annotations

from dataclasses import fields

import pytest

from hvd_train.run_files.records import EpochRecord, StepRecord


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
def test_the_fields_are_those_of_earlier_versions(kind: type, names: str) -> None:
    """They stand in metrics.jsonl and in checkpoints: a run of an earlier version is resumed and shown by them."""
    assert [field.name for field in fields(kind)] == names.split()

"""Settings of the batch: what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.refused import assert_refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"global_batch_size": 0}, "--global-batch-size is 0"),
        ({"accumulation_steps": 0}, "--accumulation-steps is 0"),
        ({"eval_batch_size": 0}, "--eval-batch-size is 0"),
        (
            {"batch_size": 8, "accumulation_steps": 3, "global_batch_size": 64},
            "--global-batch-size 64 is not a multiple of --batch-size 8 x --accumulation-steps 3 = 24",
        ),
        ({"batch_size": None, "global_batch_size": None}, "no batch size: give --batch-size"),
        ({"on_resize": "per-worker", "global_batch_size": 64}, "--on-resize per-worker needs --batch-size"),
    ],
)
def test_values_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    """The message names the flag, the value and what it must be."""
    assert_refused(changes, message)

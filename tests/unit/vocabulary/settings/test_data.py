"""Settings of the data: what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.refused import assert_refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 0}, "--image-size is 0; it must be at least 1"),
        ({"max_image_pixels": 0}, "--max-image-pixels is 0; it must be at least 1"),
        ({"workers": -1}, "--workers is -1; it must be at least 0"),
        ({"synthetic_samples": 0}, "--synthetic-samples is 0"),
        ({"data": "folder"}, "--data folder needs --data-dir"),
        ({"download": True}, "--download does not go with --data digits"),
        ({"val_crop_size": 40}, "--val-crop-size and --val-resize-size go with --data folder"),
        ({"random_erasing": 1.5}, "--random-erasing is 1.5; it must be at least 0 and at most 1"),
    ],
)
def test_values_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    """The message names the flag, the value and what it must be."""
    assert_refused(changes, message)

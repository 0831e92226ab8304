"""Settings of the data: what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_train.config import Config
from hvd_train.settings.data import DataConfig
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
        ({"val_crop_size": 40}, "--val-resize-size go with --data folder, webdataset or hf, not with"),
        ({"decode": "gpu"}, "--decode gpu goes with --data folder, webdataset or hf, not with digits"),
        ({"data": "folder", "data_dir": Path(), "decode": "gpu", "augment": "rand"}, "does not go with --augment"),
        ({"data": "folder", "data_dir": Path(), "decode": "gpu", "random_erasing": 0.1}, "nor with --random-erasing"),
        ({"cache": "disk"}, "--cache disk goes with --data folder, not with digits: leave it out"),
        ({"data": "folder", "data_dir": Path(), "cache": "disk", "decode": "gpu"}, "--cache does not go with --decode"),
        ({"data": "hf:a", "cache": "disk"}, "--cache disk goes with --data folder, not with hf: leave it out"),
        ({"data": "webdataset"}, "--data webdataset needs --data-dir"),
        ({"data": "hf"}, "--data hf needs the folder of a data set that `datasets` has saved: type --data hf:PATH"),
        ({"data": "hf:"}, "--data hf needs the folder"),
        ({"data_columns": ("label=a",)}, "--data-columns goes with --data hf:PATH, not with digits: leave it out"),
        (
            {"data": "hf:a", "data_columns": ("img=a",)},
            "--data-columns img=...: it takes image, input, label and target",
        ),
        ({"data": "hf:a", "data_columns": ("label",)}, "--data-columns label: it must be name=value"),
        ({"data": "folder", "data_dir": Path(), "cache_dir": Path()}, "--cache-dir says where a cache is"),
        ({"random_erasing": 1.5}, "--random-erasing is 1.5; it must be at least 0 and at most 1"),
    ],
)
def test_values_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    """The message names the flag, the value and what it must be."""
    assert_refused(changes, message)


def test_the_path_of_a_saved_data_set_is_its_folder() -> None:
    """So a run goes on where the folder was moved, and the same data are one setting."""
    assert DataConfig(data="hf:a/b:c") == DataConfig(data="hf", data_dir=Path("a/b:c"))
    run = Config().replace(data="hf:first")
    assert run.differences(run.replace(data_dir=Path("second"))) == []
    assert run.replace(data="hf:second").data.data_dir == Path("second")

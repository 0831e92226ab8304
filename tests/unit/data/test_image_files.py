"""Image files that the user has named, as a data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hvd_train.data import sources
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.folder import ImageFolder
from hvd_train.data.image_files import ImageFiles, find, in_place_of_validation
from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig
from tests.support.jpegs import digits


def test_files_are_taken_in_the_order_of_the_user_and_folders_in_that_of_names() -> None:
    """What has no ending of an image is left in a folder, and taken where it is named."""
    for name in ("b/2.JPG", "b/deep/1.png", "b/notes.txt", "a.raw"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    assert find([Path("b"), Path("a.raw")]) == [Path("b/2.JPG"), Path("b/deep/1.png"), Path("a.raw")]
    with pytest.raises(UsageError, match="gone: no such image or folder"):
        find([Path("gone")])
    Path("empty").mkdir()
    with pytest.raises(UsageError, match="empty holds no images"):
        find([Path("empty")])


def test_a_file_is_seen_as_the_images_of_its_data_are() -> None:
    """To the bit: a grey picture of a digit as that digit, and a file of a class folder as evaluation sees it."""
    data = sources.open_data(DataConfig(), seed=0)
    assert isinstance(data.val, Arrays)
    Image.fromarray(np.asarray(data.val.inputs[5, 0])).save("digit.png")
    files = in_place_of_validation(data, DataConfig(), paths=[Path("digit.png")]).val
    assert isinstance(files, ImageFiles)
    assert torch.equal(files[0][0], data.val.inputs[5])

    config = DataConfig(data="folder", data_dir=digits(Path("images"), (0, 1), most=3), image_size=16)
    folder = sources.open_data(config, seed=0)
    paths = find([Path("images/val")])
    files = in_place_of_validation(folder, config, paths=paths).val
    assert isinstance(files, ImageFiles)
    assert isinstance(folder.val, ImageFolder)
    assert [folder.val.path(index) for index in range(len(folder.val))] == paths
    assert all(torch.equal(files[index][0], folder.val[index][0]) for index in range(len(paths)))


def test_what_is_no_image_is_named() -> None:
    """And so is data of the user's own, which nobody else can make of a file."""
    Path("x.png").write_text("no image")
    with pytest.raises(UsageError, match=r"cannot read the image x\.png: it is damaged"):
        ImageFiles([Path("x.png")], (8, 8), 1, 100)[0]
    own = DataSet(Arrays(torch.zeros(1, 1, 2, 2), torch.zeros(1).long(), 1), None, ("a",))
    with pytest.raises(UsageError, match=r"--data mine:data makes its images itself.*--split val"):
        in_place_of_validation(own, DataConfig(data="mine:data"), paths=[Path("x.png")])

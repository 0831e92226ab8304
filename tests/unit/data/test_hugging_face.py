"""`--data hf:FOLDER`, by a stand-in for the library `datasets`, which is
not among our requirements.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pictures

from hvd_train.config import DataConfig
from hvd_train.data.hugging_face import open_saved
from hvd_train.data.stored import ImageFile, open_stored
from hvd_train.errors import UsageError
from hvd_train.plugin import is_reference
from tests.support.jpegs import encoded


class Image:
    """A feature; the library tells kinds of columns by their class."""

    def __init__(self, *, decode: bool = True) -> None:
        self.decode = decode


class ClassLabel:
    names = ("one", "two")


class Part(list[dict[str, Any]]):
    features = {"label": ClassLabel(), "picture": Image()}  # noqa: RUF012

    def cast_column(self, name: str, feature: Image) -> Any:
        assert (name, feature.decode) == ("picture", False)
        return self

    def with_format(self, kind: str) -> list[dict[str, Any]]:
        return [{**row, "format": kind} for row in self]


def parts(**named: int) -> dict[str, Part]:
    return {
        name: Part(
            {"label": n % 2, "picture": stored(Pictures.new("L", (4, 6 + n), n))}
            for n in range(count)
        )
        for name, count in named.items()
    }


def stored(picture: Pictures.Image, kind: str = "png") -> dict[str, Any]:
    return {"bytes": encoded(picture, kind), "path": None}


def use(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda path: found, Image=Image)
    )  # type: ignore[arg-type]


def test_images_and_classes_are_found_by_the_kinds_of_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, parts(train=3, validation=2))
    train, val = open_saved("saved", DataConfig(), any_items=False)
    assert (len(train), len(val), train.classes) == (3, 2, ("one", "two"))
    image, label = train[2]
    assert (image.dtype, image.shape, image.unique().tolist(), label) == (
        torch.uint8,
        (3, 8, 4),
        [2],
        0,
    )
    assert not is_reference("hf:saved")


def test_images_of_several_sizes_and_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are decoded as those of files, and square with `--image-size`."""
    found = parts(train=3)
    deep = Pictures.fromarray(np.full((6, 4), 3 << 8, np.uint16))
    found["train"].append({"label": 0, "picture": stored(deep, "tiff")})
    deep.save("deep.png")
    found["train"].append({"label": 0, "picture": {"bytes": None, "path": "deep.png"}})
    found["train"].append({"label": 0, "picture": stored(Pictures.new("F", (4, 6), 0.5), "tiff")})
    use(monkeypatch, found)
    train, _ = open_saved("saved", DataConfig(image_size=2), any_items=False)
    shapes = {train[number][0].shape for number in range(5)}
    assert shapes == {(3, 2, 2)}
    assert [train[number][0].unique().tolist() for number in range(5)] == [[0], [1], [2], [3], [3]]
    with pytest.raises(UsageError, match="cannot read the image 5 of hf:saved: it is of mode F"):
        train[5]


def test_other_tasks_get_mappings_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, parts(train=3))
    train, val = open_saved("saved", DataConfig(), any_items=True)
    assert (train[0]["format"], val) == ("torch", None)


def test_images_that_are_stored_again_keep_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first image and class number get the names that readers of shards look for."""
    found = parts(train=3, validation=1)
    Path("one.ppm").write_bytes(encoded(Pictures.new("L", (4, 6)), "ppm"))
    found["train"].append({"label": 1, "picture": {"bytes": None, "path": "one.ppm"}})
    found["train"].append({"label": 1, "picture": None})
    found["train"].append({"label": 1, "picture": {"bytes": b"none", "path": None}})
    use(monkeypatch, found)
    Path("saved").mkdir()
    data: Any = open_stored("hf:saved")
    assert (len(data.train), len(data.val), data.classes) == (6, 1, ("one", "two"))
    content = found["train"][2]["picture"]["bytes"]
    item = data.train[2]
    assert item == {"cls": 0, "image": ImageFile(content, "png"), "format": "torch"}
    assert data.train[3]["image"] == ImageFile(Path("one.ppm").read_bytes(), "ppm")
    assert data.train[4]["image"] is None
    with pytest.raises(UsageError, match="cannot read the image of row 5: cannot identify"):
        data.train[5]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (Part(), "it has no part called train"),
        (parts(test=1), "it has no part called train"),
        (
            {"train": SimpleNamespace(features={"x": 1})},
            r"its columns are .* needs an Image and a ClassLabel",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(
    monkeypatch: pytest.MonkeyPatch, found: Any, says: str
) -> None:
    use(monkeypatch, found)
    with pytest.raises(UsageError, match=says):
        open_saved("saved", DataConfig(), any_items=False)

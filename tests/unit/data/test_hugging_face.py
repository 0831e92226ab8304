"""`--data hf:FOLDER`, by a stand-in for the library `datasets`, which is
not among our requirements.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image as Pictures

from hvd_train.config import DataConfig
from hvd_train.data.hugging_face import open_saved
from hvd_train.data.stored import ImageFile, open_stored
from hvd_train.errors import UsageError
from tests.support.jpegs import encoded


@dataclass
class Image:
    """A feature; the library tells kinds of columns by their class."""

    decode: bool = True


class ClassLabel:
    names = ("one", "two")


class Part(list[dict[str, Any]]):
    features = {"label": ClassLabel(), "picture": Image()}  # noqa: RUF012

    def cast_column(self, name: str, feature: Image) -> Any:
        assert (name, feature) == ("picture", Image(decode=False))
        return self

    def with_format(self, kind: str) -> list[dict[str, Any]]:
        return [{**row, "format": kind} for row in self]


def stored(picture: Pictures.Image, kind: str = "png") -> dict[str, Any]:
    return {"bytes": encoded(picture, kind), "path": None}


def row(picture: Any, label: int = 0) -> dict[str, Any]:
    return {"label": label, "picture": picture}


def parts(**named: int) -> dict[str, Part]:
    return {
        name: Part(row(stored(Pictures.new("L", (4, 6 + n), n)), n % 2) for n in range(count))
        for name, count in named.items()
    }


def use(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    library = SimpleNamespace(load_from_disk=lambda path: found, Image=Image)
    monkeypatch.setitem(sys.modules, "datasets", library)  # type: ignore[arg-type]


def test_images_and_classes_are_found_by_the_kinds_of_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, parts(train=3, validation=2))
    train, val = open_saved("saved", DataConfig(), any_items=False)
    assert (len(train), len(val), train.classes) == (3, 2, ("one", "two"))
    image, label = train[1]
    assert (image.dtype, image.shape, label) == (torch.uint8, (3, 7, 4), 1)
    assert image.unique().tolist() == [1]


def test_images_of_several_sizes_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are decoded as those of files, and square with `--image-size`."""
    found = parts(train=2)
    Pictures.new("L", (4, 9), 3).save("three.png")
    found["train"].append(row({"bytes": None, "path": "three.png"}))
    found["train"].append(row(stored(Pictures.new("F", (4, 6), 0.5), "tiff")))
    use(monkeypatch, found)
    train, _ = open_saved("saved", DataConfig(image_size=2), any_items=False)
    for number, value in enumerate((0, 1, 3)):
        assert torch.equal(train[number][0], torch.full((3, 2, 2), value, dtype=torch.uint8))
    with pytest.raises(UsageError, match="cannot read the image 3 of hf:saved: it is of mode F"):
        train[3]


def test_other_tasks_get_mappings_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, parts(train=3))
    train, val = open_saved("saved", DataConfig(), any_items=True)
    assert (train[0]["format"], val) == ("torch", None)


def test_images_that_are_stored_again_keep_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first image and class number get the names that readers of shards look for."""
    found = parts(train=2, validation=1)
    Path("one.ppm").write_bytes(encoded(Pictures.new("L", (4, 6)), "ppm"))
    for picture in ({"bytes": None, "path": "one.ppm"}, None, {"bytes": b"none", "path": None}):
        found["train"].append(row(picture))
    use(monkeypatch, found)
    Path("saved").mkdir()
    data = open_stored("hf:saved")
    assert (len(data.train), len(data.val), data.classes) == (5, 1, ("one", "two"))
    content = found["train"][1]["picture"]["bytes"]
    assert data.train[1] == {"cls": 1, "image": ImageFile(content, "png"), "format": "torch"}
    assert data.train[2]["image"] == ImageFile(Path("one.ppm").read_bytes(), "ppm")
    assert data.train[3]["image"] is None
    with pytest.raises(UsageError, match="cannot read the image of row 4: cannot identify"):
        data.train[4]


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

"""Encoded images from a folder, from tar shards and from Arrow files: the same pixels, names in errors, no copies."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_train import cli
from hvd_train.data import sources
from hvd_train.data.coded import Coded
from hvd_train.data.dataset import DataSet, unmarked
from hvd_train.data.encoded import EncodedImages, Texts
from hvd_train.data.map_loader import MapLoader
from hvd_train.errors import UsageError
from hvd_train.progress.order import Cut, EpochOrder, assignments
from hvd_train.settings.data import DataConfig
from tests.support import jpegs, saved, shards
from tests.support.batches import CPU, PLAIN, flat
from tests.support.jpegs import encoded, noise

SPLITS = ("train", "val", "test")


@pytest.fixture
def roots() -> dict[str, Path]:
    """Return the same images in class folders, in shards and in Arrow files."""
    folder = jpegs.digits(Path("images"), (0, 1), most=5, test=True)
    for split in SPLITS:
        (folder / split / "00" / "large.jpg").write_bytes(encoded(noise(90, 70), quality=90))
        (folder / split / "01" / "other.png").write_bytes(encoded(noise(40, 60), "png"))
    shards.of_folder(folder, Path("shards"), SPLITS)
    assert cli.run(["index", "shards"]) == 0
    saved.of_folder(folder, Path("saved"), {"train": "train", "val": "validation", "test": "test"})
    return {"folder": folder, "webdataset": Path("shards"), "hf": Path("saved")}


def opened(roots: dict[str, Path], kind: str, **settings: Any) -> DataSet:
    return sources.open_data(DataConfig(data=kind, data_dir=roots[kind], image_size=16, **settings), seed=0)


def part(data: DataSet, split: str) -> EncodedImages:
    found = getattr(data, split)
    assert isinstance(found, EncodedImages)
    return found


@pytest.mark.parametrize(
    "settings", [{}, {"augment": "trivial", "random_erasing": 0.5}, {"augment": "none", "val_crop_size": 20}]
)
def test_pixels_do_not_depend_on_where_the_images_lie(roots: dict[str, Path], settings: dict[str, Any]) -> None:
    """Each sample of each split is the same to the bit, with its random changes, and so are classes and statistics."""
    folder, *others = (opened(roots, kind, **settings) for kind in roots)
    for other in others:
        assert (other.classes, other.mean, other.std) == (folder.classes, folder.mean, folder.std)
        assert (other.file_view, other.image_size) == (folder.file_view, folder.image_size)
        for split in SPLITS:
            theirs, ours = part(folder, split), part(other, split)
            assert len(ours) == len(theirs) == 12
            for index in range(12):
                torch.manual_seed(index)
                image, label = theirs[index]
                torch.manual_seed(index)
                same, same_label = ours[index]
                assert torch.equal(image, same)
                assert label == same_label


@pytest.mark.parametrize("kind", ["webdataset", "hf"])
def test_loader_processes_read_what_this_one_reads(roots: dict[str, Path], kind: str) -> None:
    """Nothing that is open or mapped here is needed there."""
    train = part(opened(roots, kind), "train")
    train[0]  # so that something is open
    found = []
    for workers in (0, 1):
        loader = MapLoader(train, PLAIN, CPU, seed=3, num_workers=workers)
        found.append(flat([*loader.load(0, assignments(EpochOrder(3, 0, 12), 0, Cut(5, 5), 0, 1))]))
        loader.close()
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["folder", "webdataset", "hf"])
def test_a_gpu_gets_the_files_that_it_decodes(roots: dict[str, Path], kind: str) -> None:
    """With `--decode gpu`, a plain JPEG leaves as it is, with its name, and a PNG as pixels."""
    train = part(opened(roots, kind, decode="gpu"), "train")
    items = [train.staged_item(index, unmarked)[0] for index in range(12)]
    files = [index for index, item in enumerate(items) if isinstance(item, Coded)]
    assert files == [*range(11)]
    for index in files:
        item = items[index]
        assert isinstance(item, Coded)
        assert item.content.numpy().tobytes() == train.read(index)
        assert item.request.path == train.name(index)


@pytest.mark.parametrize("kind", ["folder", "webdataset", "hf"])
def test_an_image_of_too_many_pixels_is_named(roots: dict[str, Path], kind: str) -> None:
    """By its file, by its key and shard, or by its row."""
    val = part(opened(roots, kind, max_image_pixels=1100), "val")
    val[0]
    name = {"folder": "images/val/00/large.jpg", "webdataset": "0-large in shards/val/000.tar"}
    told = name.get(kind, "image of row 5 of the val split of saved")
    with pytest.raises(UsageError) as caught:
        val[5]
    assert str(caught.value) == (
        f"cannot read the image {told}: it has more pixels than --max-image-pixels 1100 allows; mend or remove it"
    )


@pytest.mark.parametrize("kind", ["webdataset", "hf"])
def test_a_loader_process_is_sent_few_bytes(roots: dict[str, Path], kind: str) -> None:
    """Keys, places and labels are in memory that is shared, and what is mapped or open stays here."""
    train = part(opened(roots, kind), "train")
    train[3]
    assert len(ForkingPickler.dumps(train)) < 10_000


def test_texts_are_kept_whatever_is_in_them() -> None:
    """Empty ones, any bytes, and none at all."""
    texts = [b"", b"\xff\n", b"", "é".encode()]
    kept = Texts.of(texts)
    assert [kept[index] for index in range(4)] == texts
    Texts.of([])

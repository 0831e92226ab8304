"""Data sets that `datasets` has saved: which columns are taken, what is refused, and that nothing else is read."""

from __future__ import annotations

import json
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Array2D, ClassLabel, Image, List, Value

from hvd_train.data import sources
from hvd_train.data.arrow_rows import ArrowImages
from hvd_train.data.dataset import DataSet
from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig
from tests.support import jpegs, saved

JPEG = {"bytes": jpegs.encoded(jpegs.noise(20, 20)), "path": None}
OTHER = {"bytes": jpegs.encoded(jpegs.noise(24, 20)), "path": None}
CLASSES = ClassLabel(names=["cat", "dog"])


def opened(
    parts: dict[str, dict[str, list[Any]]], features: dict[str, Any] | None = None, task: str = "classes", **config: Any
) -> DataSet:
    """Save these columns of each split and open them again."""
    saved.save(Path("saved"), parts, features)
    return sources.open_data(DataConfig(data="hf:saved", **config), seed=0, of_classes=task == "classes")


def test_images_and_labels_are_found_by_their_types() -> None:
    """Whatever their names are; a single set has no validation."""
    data = opened({"": {"picture": [JPEG, OTHER], "kind": [1, 0]}}, {"picture": Image(), "kind": CLASSES})
    assert isinstance(data.train, ArrowImages)
    assert [data.train[index][1] for index in range(2)] == [1, 0]
    assert data.train.read(1) == OTHER["bytes"]
    assert (data.classes, data.val, data.test) == (("cat", "dog"), None, None)


def test_columns_that_are_several_are_typed() -> None:
    """The usual names decide among them; without one the line says what there is and what to type."""
    features = {"a": Image(), "b": Image(), "coarse_label": CLASSES, "fine_label": ClassLabel(names=["x", "y", "z"])}
    columns = {"a": [JPEG], "b": [OTHER], "coarse_label": [1], "fine_label": [2]}
    for settings, why in (
        ((), "coarse_label and fine_label may be the target"),
        (("label=fine_label",), "a and b may"),
    ):
        with pytest.raises(UsageError) as caught:
            opened({"": columns}, features, data_columns=settings)
        assert why in str(caught.value)
        assert str(caught.value).endswith(
            "its columns are a (Image), b (Image), coarse_label (ClassLabel), fine_label (ClassLabel): type "
            "--data-columns image=COLUMN label=COLUMN (input=[A,B] for several)"
        )
    data = opened({"": columns}, features, data_columns=("image=b", "label=fine_label"))
    assert isinstance(data.train, ArrowImages)
    assert (data.train.read(0), data.train[0][1], data.classes) == (OTHER["bytes"], 2, ("x", "y", "z"))
    usual = opened({"": {**columns, "label": [0], "img": [JPEG]}}, {**features, "label": CLASSES, "img": Image()})
    assert isinstance(usual.train, ArrowImages)
    assert (usual.train.read(0), usual.train[0][1]) == (JPEG["bytes"], 0)


def test_labels_may_be_numbers_or_texts() -> None:
    """Numbers are counted in all splits, and texts are the classes in the order of the alphabet."""
    features = {"image": Image(), "label": Value("int32")}
    data = opened({"train": {"image": [JPEG], "label": [1]}, "val": {"image": [JPEG], "label": [3]}}, features)
    assert data.classes == ("0", "1", "2", "3")
    features["label"] = Value("string")
    columns = {"image": [JPEG] * 3, "label": ["dog", "cat", "dog"]}
    data = opened({"train": columns, "test": {"image": [JPEG], "label": ["cat"]}}, features)
    assert data.classes == ("cat", "dog")
    assert [data.train[index][1] for index in range(3)] == [1, 0, 1]  # type: ignore[index]
    assert data.test is not None
    with pytest.raises(
        UsageError, match=r"the test split of saved: row 0 has the label 'cow', of which train has none"
    ):
        opened({"train": columns, "test": {"image": [JPEG], "label": ["cow"]}}, features)


def test_other_tasks_get_tensors() -> None:
    """One column is a tensor and several are a dict; fractions are float32, whole numbers int64, bytes bytes."""
    features = {
        "a": List(Value("float64")), "b": Value("int16"), "c": Array2D((2, 3), "uint8"), "d": Value("bool"),
        "target": List(Value("float32")),
    }  # fmt: skip
    row = {"a": [0.5, 1.5], "b": 7, "c": [[1, 2, 3], [4, 5, 6]], "d": True, "target": [0.25]}
    data = opened({"": {name: [value, value] for name, value in row.items()}}, features, "regression")
    inputs, target = data.train[1]  # type: ignore[index]
    expected = {
        "a": torch.tensor([0.5, 1.5]), "b": torch.tensor(7), "c": torch.tensor(row["c"], dtype=torch.uint8),
        "d": torch.tensor(True),
    }  # fmt: skip
    assert inputs.keys() == expected.keys()
    assert all(
        torch.equal(inputs[name], value) and inputs[name].dtype == value.dtype for name, value in expected.items()
    )
    assert torch.equal(target, torch.tensor([0.25]))
    chosen = opened(
        {"": {name: [value, value] for name, value in row.items()}}, features, "regression",
        data_columns=("input=a", "target=b"),
    )  # fmt: skip
    inputs, target = chosen.train[0]  # type: ignore[index]
    assert (inputs.tolist(), target.tolist(), chosen.channels) == ([0.5, 1.5], 7, 2)


def test_tables_of_classes_and_pictures_of_other_tasks() -> None:
    """A column of numbers is the input where there is no image; a whole image where the target is no class."""
    table = opened({"": {"x": [[1.0, 2.0]], "y": [1]}}, {"x": List(Value("float32")), "y": CLASSES})
    assert (table.train[0][1], table.classes, table.channels) == (1, ("cat", "dog"), 2)  # type: ignore[index]
    images = opened(
        {"": {"image": [OTHER], "target": [0.5]}}, {"image": Image(), "target": Value("float32")}, "regression"
    )
    pixels, target = images.train[0]  # type: ignore[index]
    assert torch.equal(pixels, jpegs.whole(OTHER["bytes"]))
    assert (target.item(), len(images.mean)) == (0.5, 3)


TOKENS = {"input_ids": [[5, 6, 7, 8], [1, 2, 3, 4]]}
MASK = {"attention_mask": [[1, 1, 1, 1], [1, 1, 1, 1]]}


@pytest.mark.parametrize(
    ("columns", "note"),
    [
        (TOKENS, None),
        ({**TOKENS, **MASK, "labels": TOKENS["input_ids"]}, "left out: attention_mask, labels"),
    ],
)
def test_tokens_are_inputs_and_targets_shifted_by_one(columns: dict[str, list[Any]], note: str | None) -> None:
    """The labels that transformers has for causal models are the tokens again; what is left out is told."""
    data = opened({"": columns}, task="language-model")
    inputs, targets = data.train[1]  # type: ignore[index]
    assert (inputs.tolist(), targets.tolist(), inputs.dtype) == ([1, 2, 3], [2, 3, 4], torch.int64)
    assert (data.note or "").endswith(note or "")
    assert (data.note is None) == (note is None)


def test_labels_of_tokens_that_are_others_are_targets() -> None:
    """As those of a task that names each token; a model takes the inputs by their names."""
    data = opened({"": {**TOKENS, **MASK, "labels": [[0, 1, 0, 1]] * 2}}, task="segmentation")
    inputs, targets = data.train[0]  # type: ignore[index]
    assert [*inputs] == ["input_ids", "attention_mask"]
    assert targets.tolist() == [0, 1, 0, 1]


IMAGES = {"image": Image(), "label": CLASSES}
ONE = {"image": [JPEG], "label": [1]}
REFUSED: dict[str, tuple[dict[str, dict[str, list[Any]]], dict[str, Any] | None, str, str]] = {
    "no rows": ({"train": {"image": [], "label": []}}, IMAGES, "classes", "the train split of saved has no rows"),
    "no rows to evaluate": (
        {"train": ONE, "val": {"image": [], "label": []}}, IMAGES, "classes", "the val split of saved has no rows"
    ),
    "no train": ({"a": ONE, "b": ONE}, IMAGES, "classes", "has no split named train, but a, b"),
    "two validations": (
        {"train": ONE, "val": ONE, "validation": ONE}, IMAGES, "classes", "has both validation and val: leave one"
    ),
    "no value": ({"": {"image": [JPEG], "label": [None]}}, IMAGES, "classes", "column label has no value in 1 rows"),
    "no class": ({"": {"image": [JPEG], "label": [-1]}}, IMAGES, "classes", "row 0 has the label -1; those of 2"),
    "huge": (
        {"": {"image": [JPEG], "label": [10**12]}}, {"image": Image(), "label": Value("int64")}, "classes",
        "row 0 has the label 1000000000000; those of 65,536 classes are",
    ),
    "fractions": (
        {"": {"image": [JPEG], "label": [0.5]}}, {"image": Image(), "label": Value("float32")}, "classes",
        "has no class numbers",
    ),
    "no target": (
        {"train": {"x": [1.0], "y": [[1]]}, "val": {"x": [1], "y": [[1]]}}, None, "regression",
        r"type --data-columns input=COLUMN target=COLUMN",
    ),
    "texts": (
        {"": {"text": ["a"], "label": [1]}}, {"text": Value("string"), "label": CLASSES}, "classes",
        r"text \(string\) is no tensor; its columns are text \(Value\), label \(ClassLabel\)",
    ),
    "a target alone": ({"": {"label": [1]}}, {"label": CLASSES}, "classes", "no column is left for the inputs"),
    "lengths": ({"": {"x": [[1.0], [1.0, 2.0]], "target": [1.0, 2.0]}}, None, "regression", "have 1 to 2 values"),
    "gaps": (
        {"": {"x": [[1.0, None], [1.0, 2.0]], "target": [1.0, 2.0]}}, None, "regression", "the column x lacks a value"
    ),
    "uneven tokens": ({"": {"input_ids": [[1, 2], [1, 2, 3]]}}, None, "language-model", "input_ids have 2 to 3 values"),
    "one token": ({"": {"input_ids": [[1], [2]]}}, None, "language-model", "must have 2 tokens at least"),
    "padding": (
        {"": {**TOKENS, "attention_mask": [[1, 1, 1, 0], [1, 1, 1, 1]]}}, None, "language-model", "rows are padded"
    ),
    "tokens left out": (
        {"": {**TOKENS, "labels": [[-100, 6, 7, 8], [1, 2, 3, 4]]}}, None, "language-model", "leaves tokens .* by -100"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_trained_on_is_refused(fault: str) -> None:
    """One line says what is missing or unclear, and what to type."""
    parts, features, task, message = REFUSED[fault]
    with pytest.raises(UsageError, match=message) as caught:
        opened(parts, features, task)
    assert "\n" not in str(caught.value)


def test_images_that_are_only_named_are_not_read() -> None:
    """A path in a data set may be anywhere, or be fetched from another host."""
    features = {"image": {"bytes": Value("binary"), "path": Value("string")}, "label": CLASSES}
    saved.save(Path("saved"), {"": {"image": [{"bytes": None, "path": "/etc/a.jpg"}], "label": [1]}}, features)
    info = json.loads(Path("saved/dataset_info.json").read_text())
    info["features"]["image"] = {"_type": "Image"}
    Path("saved/dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(UsageError, match="1 images of the column image are not in it, but named: save it anew with"):
        sources.open_data(DataConfig(data="hf:saved"), seed=0)


def test_splits_of_different_columns_are_refused() -> None:
    """Also where the classes have other names."""
    saved.save(Path("saved"), {"train": ONE}, IMAGES)
    saved.save(Path("other"), {"val": ONE}, {"image": Image(), "label": ClassLabel(names=["dog", "cat"])})
    Path("other/val").rename("saved/val")
    Path("saved/dataset_dict.json").write_text('{"splits": ["train", "val"]}')
    with pytest.raises(UsageError, match=r"the column label is ClassLabel\(names=\['cat', 'dog'\]\) in train, and"):
        sources.open_data(DataConfig(data="hf:saved"), seed=0)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("image=gone",), "there is no column gone"),
        (("label=[image,label]",), "one column is the target"),
        (("image=label", "label=label"), "no column is left for the inputs"),
    ],
)
def test_columns_that_cannot_be_are_refused(columns: tuple[str, ...], message: str) -> None:
    """With the columns that there are."""
    with pytest.raises(UsageError, match=rf"{message}; its columns are image \(Image\), label \(ClassLabel\)"):
        opened({"": ONE}, IMAGES, data_columns=columns)


def test_a_gpu_decodes_images_of_classes_alone() -> None:
    """Settings for encoded images are refused where rows are tensors."""
    with pytest.raises(UsageError, match=r"--decode gpu, .* are for images of classes"):
        opened({"": {"x": [1.0], "target": [1.0]}}, None, "regression", decode="gpu")


def plant_pickle(root: Path) -> None:
    """Put a pickle, which would leave a file, into the place of the rows."""

    class Harm:
        def __reduce__(self) -> Any:
            return Path("harm").touch, ()

    next(root.glob("*.arrow")).write_bytes(pickle.dumps(Harm()))


def plant_path(root: Path) -> None:
    """Let the rows be those of a file that is no part of the data set."""
    (root / "data-00000-of-00001.arrow").rename("elsewhere.arrow")
    state = json.loads((root / "state.json").read_text())
    state["_data_files"] = [{"filename": "../elsewhere.arrow"}]
    (root / "state.json").write_text(json.dumps(state))


def cut(root: Path) -> None:
    """Cut the rows off."""
    path = next(root.glob("*.arrow"))
    path.write_bytes(path.read_bytes()[:-200])


def deep(root: Path) -> None:
    """Nest the description without end."""
    (root / "dataset_info.json").write_text("[" * 100_000)


def unknown(root: Path) -> None:
    """Let a column be of a type that nobody knows."""
    info = json.loads((root / "dataset_info.json").read_text())
    info["features"]["image"]["_type"] = "Harm"
    (root / "dataset_info.json").write_text(json.dumps(info))


def lost(root: Path) -> None:
    """Take the description away."""
    (root / "state.json").unlink()


@pytest.mark.parametrize("damage", [plant_pickle, plant_path, cut, deep, unknown, lost], ids=lambda one: one.__name__)
def test_a_damaged_or_planted_data_set_is_refused(damage: Any) -> None:
    """One line names it, and nothing of what it holds is run."""
    saved.save(Path("saved"), {"": ONE}, IMAGES)
    damage(Path("saved"))
    with pytest.raises(UsageError, match="saved") as caught:
        sources.open_data(DataConfig(data="hf:saved"), seed=0)
    assert "\n" not in str(caught.value)
    assert not Path("harm").exists()


@pytest.mark.parametrize("name", ["gone", "hub/name", "s3://bucket/set", "https://host/set", "saved::zip://x"])
def test_what_is_not_on_disk_is_not_fetched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is opened, whatever the name looks like."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))
    with pytest.raises(
        UsageError, match=r"there is no such folder; it is read from disk alone: .*save_to_disk\(PATH\)"
    ):
        sources.open_data(DataConfig(data=f"hf:{name}"), seed=0)
    saved.save(Path("saved"), {"": ONE}, IMAGES)
    sources.open_data(DataConfig(data="hf:saved"), seed=0)


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to type."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError) as caught:
        sources.open_data(DataConfig(data="hf:saved"), seed=0)
    assert str(caught.value) == "--data hf:PATH needs datasets: type pip install 'hvd_train[huggingface]'"

"""Data sets that `datasets` of Hugging Face has saved to disk (`save_to_disk`), by their columns."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hvd_train import plain_file
from hvd_train.data.arrow_rows import ArrowFiles, ArrowImages, ArrowRows, ArrowTokens, is_image
from hvd_train.data.dataset import IMAGENET_MEAN, IMAGENET_STD, DataSet, Source
from hvd_train.errors import UsageError
from hvd_train.settings.arguments import arguments_in
from hvd_train.settings.data import DataConfig

if TYPE_CHECKING:
    import pyarrow

_SPLITS = {"train": ("train",), "val": ("validation", "val"), "test": ("test",)}
_TARGETS = ("label", "labels", "target", "targets")
_IMAGES = ("image", "img")
_TOKENS = "input_ids"
_MOST_CLASSES = 1 << 16
_LOOKED_AT = 1000  # rows, where a look at all would read all of the data


@dataclass(frozen=True)
class _Columns:
    """Which columns are inputs and which one is the target; None: the inputs themselves, shifted by one."""

    inputs: tuple[str, ...]
    target: str | None
    left_out: tuple[str, ...] = ()


def open_saved(root: Path, config: DataConfig, *, of_classes: bool) -> DataSet:
    """Return the data set that `datasets` has saved in the folder `root`.

    `of_classes`: its items are images, or tensors, and numbers of classes. Raises UsageError where `datasets` is
    missing, where the folder holds no data set that can be read, and where it is unclear which columns are meant.
    """
    saved = _saved(root)
    rows = {split: _rows(root, split, part) for split, part in saved.items()}
    features = dict(saved["train"].features)
    columns = _chosen(root, features, rows["train"], config, of_classes=of_classes)
    used = [*columns.inputs, *([] if columns.target is None else [columns.target])]
    for split, part in saved.items():
        _check_like_training(root, split, part.features, features, used)
        for name in used:
            rows[split].check(name)
            _check_values(rows[split], name)
    if columns.target is None:
        tokens: dict[str, Source] = {split: ArrowTokens(part, columns.inputs[0]) for split, part in rows.items()}
        left = f"; left out: {', '.join(columns.left_out)}" if columns.left_out else ""
        note = f"inputs and targets are {_TOKENS}, shifted by one{left}" if left else None
        return DataSet(tokens["train"], tokens.get("val"), test=tokens.get("test"), note=note)
    classes, labels = _classes(root, features[columns.target], rows, columns.target, of_classes=of_classes)
    if of_classes and len(columns.inputs) == 1 and is_image(rows["train"].column(columns.inputs[0]).type):
        from hvd_train.data import views  # slow to import

        images = {
            split: ArrowImages(
                part,
                columns.inputs[0],
                labels[split],
                views.of_training(config) if split == "train" else views.of_evaluation(config),
            )
            for split, part in rows.items()
        }
        return views.data_set(config, classes, images["train"], images.get("val"), images.get("test"))
    return _of_rows(config, columns, classes, rows, labels)


def _of_rows(
    config: DataConfig,
    columns: _Columns,
    classes: tuple[str, ...],
    rows: Mapping[str, ArrowFiles],
    labels: Mapping[str, Tensor],
) -> DataSet:
    """Return the data set of rows that are pairs of inputs and a target."""
    if config.decode == "gpu" or config.val_crop_size or config.val_resize_size:
        raise UsageError("--decode gpu, --val-crop-size and --val-resize-size are for images of classes")
    assert columns.target is not None
    parts = {
        split: ArrowRows(part, columns.inputs, columns.target, labels.get(split), config.max_image_pixels)
        for split, part in rows.items()
    }
    first = parts["train"][0][0]
    is_of_images = isinstance(first, Tensor) and first.ndim == 3 and first.dtype == torch.uint8 and len(first) == 3
    return DataSet(
        parts["train"],
        parts.get("val"),
        classes,
        channels=len(first) if isinstance(first, Tensor) and first.ndim in (1, 3) else 3,
        mean=IMAGENET_MEAN if is_of_images else (),
        std=IMAGENET_STD if is_of_images else (),
        test=parts.get("test"),
    )


def _saved(root: Path) -> dict[str, Any]:
    """Return the parts of a saved data set, each a `datasets.Dataset`, by the names of splits."""
    try:
        import datasets
    except ImportError:
        raise UsageError("--data hf:PATH needs datasets: type pip install 'hvd_train[huggingface]'") from None
    if "::" in str(root) or not root.is_dir():  # fsspec, below `datasets`, opens what comes after :: from elsewhere
        raise UsageError(
            f"--data hf:{root}: there is no such folder; it is read from disk alone: save the data set there first, by "
            "load_dataset(...).save_to_disk(PATH) of `datasets`"
        )
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # each rank would have one
    try:
        found: Any = datasets.load_from_disk(str(root.absolute()), keep_in_memory=False)
    except FileNotFoundError as error:
        raise UsageError(
            f"--data hf:{root} is no data set that save_to_disk of `datasets` has made: {_first_line(error)}"
        ) from None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        for split, names in _SPLITS.items():  # `datasets` saves a part without rows, and cannot read it again
            if any(_has_no_files(root / name) for name in names):
                raise UsageError(f"the {split} split of {root} has no rows") from None
        raise UsageError(f"--data hf:{root}: `datasets` cannot read it: {_first_line(error)}") from None
    finally:
        if shown:
            datasets.enable_progress_bars()
    parts = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    saved = {}
    for split, names in _SPLITS.items():
        of_split = [name for name in names if name in parts]
        if len(of_split) > 1:
            raise UsageError(f"--data hf:{root} has both {' and '.join(of_split)}: leave one of them")
        if of_split:
            saved[split] = parts[of_split[0]]
    if "train" not in saved:
        raise UsageError(f"--data hf:{root} has no split named train, but {', '.join(map(str, parts)) or 'none'}")
    return saved


def _has_no_files(part: Path) -> bool:
    try:
        state = json.loads(plain_file.read_text(part / "state.json"))
        return bool(state["_data_files"] == [])
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return False


def _rows(root: Path, split: str, part: Any) -> ArrowFiles:
    """Return the rows of a part of a data set. Raises UsageError where there are none."""
    title = f"the {split} split of {root}"
    files = [os.path.normpath(file["filename"]) for file in part.cache_files]
    outside = [file for file in files if not Path(file).is_relative_to(os.path.normpath(root.absolute()))]
    if outside:
        raise UsageError(f"{title} names a file outside of it: {outside[0]}")
    if not len(part) or not files:
        raise UsageError(f"{title} has no rows")
    return ArrowFiles(title, files)


def _chosen(
    root: Path, features: Mapping[str, Any], rows: ArrowFiles, config: DataConfig, *, of_classes: bool
) -> _Columns:
    """Return which columns are meant: those of --data-columns, or else by their types and usual names."""
    typed = arguments_in("data-columns", config.data_columns)
    unclear = _Unclear(root, features, of_classes)
    inputs = unclear.known(typed, "image", "input")
    targets = unclear.known(typed, "label", "target")
    if len(targets or ()) > 1:
        raise unclear.error("one column is the target")
    if not of_classes and _TOKENS in features and not targets and inputs in (None, (_TOKENS,)):
        labels = next((name for name in _TARGETS if name in features), None)
        if inputs is not None or labels is None or _repeats_tokens(rows, labels):
            return _of_tokens(features, rows)
    target = targets[0] if targets else _found_target(features, unclear, of_classes=of_classes)
    if inputs is None:
        rest = tuple(name for name in features if name != target)
        pictures = tuple(name for name in rest if type(features[name]).__name__ == "Image") if of_classes else ()
        usual = tuple(name for name in pictures if name in _IMAGES)
        inputs = usual if len(usual) == 1 else pictures or rest
    if target in inputs or not inputs:
        raise unclear.error("no column is left for the inputs")
    images = [name for name in inputs if is_image(rows.column(name).type)]
    if len(inputs) > 1 and images and of_classes:
        raise unclear.error(f"{' and '.join(images)} may be the image")
    for name in (*inputs, target):
        kind = rows.column(name).type
        if not (_is_numeric(kind) or (name in images) or (of_classes and name == target and _is_text(kind))):
            raise unclear.error(f"{name} ({kind}) is no tensor")
    return _Columns(inputs, target)


@dataclass(frozen=True)
class _Unclear:
    """Makes the errors that say which columns there are, and what to type."""

    root: Path
    features: Mapping[str, Any]
    of_classes: bool

    def error(self, why: str) -> UsageError:
        """Return the error."""
        columns = ", ".join(f"{name} ({type(feature).__name__})" for name, feature in self.features.items())
        todo = "image=COLUMN label=COLUMN" if self.of_classes else "input=COLUMN target=COLUMN"
        return UsageError(
            f"--data hf:{self.root}: {why}; its columns are {columns}: type --data-columns {todo} (input=[A,B] for "
            "several)"
        )

    def known(self, typed: Mapping[str, Any], *roles: str) -> tuple[str, ...] | None:
        """Return the columns that are typed for a role, which has several names, or None."""
        named = [typed[role] for role in roles if role in typed]
        if not named:
            return None
        names = tuple(name for value in named for name in (value if isinstance(value, tuple) else (value,)))
        if wrong := [name for name in names if name not in self.features]:
            raise self.error(f"there is no column {wrong[0]}")
        return names


def _found_target(features: Mapping[str, Any], unclear: _Unclear, *, of_classes: bool) -> str:
    usual = [name for name in _TARGETS if name in features]
    numbered = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    if of_classes and len(numbered) == 1:
        return numbered[0]
    candidates = [name for name in usual if not of_classes or not numbered or name in numbered]
    if len(candidates) != 1:
        several = candidates or (numbered if of_classes else [])
        why = f"{' and '.join(several)} may be the target" if several else "no column has the name of a target"
        raise unclear.error(why)
    return candidates[0]


def _repeats_tokens(rows: ArrowFiles, labels: str) -> bool:
    """Return whether labels are those of a causal language model by transformers: the tokens again, not shifted.

    Raises UsageError where some are left out by -100, since the targets here are all tokens.
    """
    first, again = (rows.column(name)[0].as_py() for name in (_TOKENS, labels))
    if not isinstance(again, list) or not isinstance(first, list) or len(again) != len(first):
        return False
    kept = [(one, other) for one, other in zip(first, again, strict=True) if other != -100]
    if not kept or any(one != other for one, other in kept):
        return False
    if len(kept) < len(first):
        raise UsageError(
            f"{rows.title}: {labels} leaves tokens of {_TOKENS} out by -100; type --data-columns input={_TOKENS} to "
            "learn all tokens, or bring the data as your own, --data mine:data"
        )
    return True


def _of_tokens(features: Mapping[str, Any], rows: ArrowFiles) -> _Columns:
    """Return the columns of a language model. Raises UsageError where rows are padded."""
    import pyarrow.compute

    if "attention_mask" in features:  # of the first rows: there may be as many bytes of masks as of tokens
        masks = rows.column("attention_mask").slice(0, _LOOKED_AT)
        if pyarrow.compute.min(pyarrow.compute.list_flatten(masks)).as_py() == 0:
            raise UsageError(
                f"{rows.title}: attention_mask has zeros, so rows are padded, and padding would be learnt: join the "
                "texts and cut them into rows of one length"
            )
    return _Columns((_TOKENS,), None, tuple(name for name in features if name != _TOKENS))


def _check_like_training(
    root: Path, split: str, features: Mapping[str, Any], training: Mapping[str, Any], used: Sequence[str]
) -> None:
    for name in used:
        if features.get(name) != training[name]:
            raise UsageError(
                f"--data hf:{root}: the column {name} is {training[name]} in train, and {features.get(name)} in {split}"
            )


def _check_values(rows: ArrowFiles, name: str) -> None:
    """Raise UsageError where lists of a column have several lengths or lack a value, or an image is not in it."""
    import pyarrow.compute
    import pyarrow.types

    column = rows.column(name)
    if pyarrow.types.is_struct(column.type):
        missing = pyarrow.compute.struct_field(column, "bytes").null_count
        if missing:
            raise UsageError(
                f"{rows.title}: {missing:,} images of the column {name} are not in it, but named: save it anew with "
                "save_to_disk, which takes them in"
            )
    elif hasattr(column.type, "value_type"):
        lengths = pyarrow.compute.min_max(pyarrow.compute.list_value_length(column))
        shortest, longest = lengths["min"].as_py(), lengths["max"].as_py()
        if shortest != longest:
            raise UsageError(
                f"{rows.title}: the lists of the column {name} have {shortest:,} to {longest:,} values; they must have "
                "one length, or be your own data with a `collate`"
            )
        if pyarrow.compute.list_flatten(column).null_count:
            raise UsageError(f"{rows.title}: a list of the column {name} lacks a value")
        if name == _TOKENS and longest < 2:
            raise UsageError(f"{rows.title}: a row of {_TOKENS} must have 2 tokens at least")


def _classes(
    root: Path, feature: Any, rows: Mapping[str, ArrowFiles], target: str, *, of_classes: bool
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Return the names of the classes and the class numbers of all rows, or the names alone for other tasks."""
    names = tuple(feature.names) if type(feature).__name__ == "ClassLabel" and feature.names else None
    if not of_classes:
        return names or (), {}
    columns = {split: part.column(target) for split, part in rows.items()}
    if _is_text(columns["train"].type):
        names = _texts(columns["train"])
        if len(names) > _MOST_CLASSES:
            raise UsageError(f"--data hf:{root}: the column {target} has {len(names):,} different texts")
        labels = {split: _numbers_of(rows[split], target, column, names) for split, column in columns.items()}
    else:
        if not _is_whole(columns["train"].type):
            raise UsageError(f"--data hf:{root}: the column {target} ({columns['train'].type}) has no class numbers")
        labels = {split: torch.from_numpy(column.to_numpy().astype(np.int64)) for split, column in columns.items()}
    most = len(names) if names else _MOST_CLASSES
    for split, numbers in labels.items():
        wrong = (numbers < 0) | (numbers >= most)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise UsageError(
                f"{rows[split].title}: row {row} has the {target} {int(numbers[row])}; those of {most:,} classes are "
                f"0 to {most - 1:,}"
            )
    if names is None:
        names = tuple(map(str, range(max(int(numbers.max()) for numbers in labels.values()) + 1)))
    return names, labels


def _texts(column: pyarrow.ChunkedArray) -> tuple[str, ...]:
    import pyarrow.compute

    return tuple(sorted(map(str, pyarrow.compute.unique(column).to_pylist())))


def _numbers_of(rows: ArrowFiles, target: str, column: pyarrow.ChunkedArray, names: Sequence[str]) -> Tensor:
    """Return the class number of each row of a column of texts. Raises UsageError for one that is no class."""
    import pyarrow
    import pyarrow.compute

    numbers = pyarrow.compute.index_in(column, value_set=pyarrow.array(names, type=column.type))
    if numbers.null_count:
        row = pyarrow.compute.index(numbers.is_null(), True).as_py()
        raise UsageError(f"{rows.title}: row {row} has the {target} {column[row].as_py()!r}, of which train has none")
    return torch.from_numpy(numbers.to_numpy().astype(np.int64))


def _is_numeric(kind: Any) -> bool:
    import pyarrow.types

    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return bool(_is_whole(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_boolean(kind))


def _is_whole(kind: Any) -> bool:
    import pyarrow.types

    return bool(pyarrow.types.is_integer(kind))


def _is_text(kind: Any) -> bool:
    import pyarrow.types

    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__

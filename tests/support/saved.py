"""Data sets that Hugging Face's `datasets` saves to disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image


def save(
    root: Path, columns: Mapping[str, Mapping[str, Sequence[Any]]], features: Mapping[str, Any] | None = None
) -> Path:
    """Save the columns of each split, a `Dataset` alone where the split has no name, and return `root`."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        of_features = Features(features) if features is not None else None
        parts = {name: Dataset.from_dict(dict(part), features=of_features) for name, part in columns.items()}
        (parts[""] if "" in parts else DatasetDict(parts)).save_to_disk(root)
    finally:
        if shown:
            datasets.enable_progress_bars()
    return root


def of_folder(root: Path, target: Path, splits: Mapping[str, str]) -> Path:
    """Save the images of class folders in the order in which a folder has them; `splits` has new names."""
    classes = sorted(path.name for path in (root / "train").iterdir())
    found = {}
    for split, name in splits.items():
        paths = [path for label in classes for path in sorted((root / split / label).iterdir())]
        found[name] = {
            "image": [{"bytes": path.read_bytes(), "path": None} for path in paths],
            "label": [classes.index(path.parent.name) for path in paths],
        }
    return save(target, found, {"image": Image(), "label": ClassLabel(names=classes)})

"""Data sets that Hugging Face's `datasets` has saved."""

from typing import Any

from hvd_train import plugin
from hvd_train.config import DataConfig
from hvd_train.errors import UsageError, first_line

VALIDATION = ("validation", "val", "valid", "dev", "test")  # names of this set in a DatasetDict


def saved_parts(path: str) -> tuple[Any, Any]:
    """Return the training and the validation set (or None) in a folder of
    `DatasetDict.save_to_disk`.

    Raises UsageError.
    """
    library = plugin.library("datasets", f"--data hf:{path}")
    try:
        parts = library.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--data hf:{path}: {first_line(error)}") from None
    if "train" not in (parts if isinstance(parts, dict) else ()):
        raise UsageError(
            f"--data hf:{path}: it has no part called train: save a DatasetDict with "
            "train and validation"
        )
    val = next((parts[name] for name in VALIDATION if name in parts), None)
    return parts["train"], val


def columns_of(part: Any, kind: str) -> list[str]:
    """Return the columns of a kind: Image or ClassLabel."""
    return [name for name, feature in part.features.items() if type(feature).__name__ == kind]


def undecoded(part: Any, image: str) -> Any:
    """Return a set whose column `image` has the bytes or the path of each file."""
    library = plugin.library("datasets", "--data hf:")
    return part.cast_column(image, library.Image(decode=False))


def open_saved(path: str, config: DataConfig, *, any_items: bool) -> tuple[Any, Any]:
    """Return the training and the validation set (or None) in a folder of
    `DatasetDict.save_to_disk`.

    With `any_items`, items are mappings with tensors; else each is an image and a class number.
    Raises UsageError.
    """
    train, val = saved_parts(path)
    if any_items:
        return tuple(part and part.with_format("torch") for part in (train, val))
    images = columns_of(train, "Image")
    labels = columns_of(train, "ClassLabel")
    if not (images and labels):
        kinds = {name: type(feature).__name__ for name, feature in train.features.items()}
        raise UsageError(
            f"--data hf:{path}: its columns are {kinds}: classification needs an "
            "Image and a ClassLabel"
        )
    from hvd_train.data.folder import LabelledImages  # slow to import

    train, val = (
        part
        and LabelledImages(f"hf:{path}", undecoded(part, images[0]), images[0], labels[0], config)
        for part in (train, val)
    )
    return train, val

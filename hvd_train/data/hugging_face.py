"""Data sets that Hugging Face's `datasets` has saved."""

import importlib
from typing import Any

from torch import Tensor

from hvd_train.errors import UsageError

_VALIDATION = ("validation", "val", "valid", "dev", "test")  # names of this set in a DatasetDict


def open_saved(path: str, *, any_items: bool) -> tuple[Any, Any]:
    """Return the training and the validation set (or None) in a folder of `DatasetDict.save_to_disk`.

    With `any_items`, items are mappings with tensors; else each is an image and a class number. Raises UsageError.
    """
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError:
        raise UsageError(f"--data hf:{path}: datasets is not installed: pip install datasets") from None
    try:
        parts = library.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--data hf:{path}: {str(error).splitlines()[0]}") from None
    if "train" not in (parts if isinstance(parts, dict) else ()):
        raise UsageError(f"--data hf:{path}: it has no part called train: save a DatasetDict with train and validation")
    val = next((parts[name] for name in _VALIDATION if name in parts), None)
    if any_items:
        return tuple(part and part.with_format("torch") for part in (parts["train"], val))  # type: ignore[return-value]
    kinds = {name: type(feature).__name__ for name, feature in parts["train"].features.items()}
    image, label = (next((name for name in kinds if kinds[name] == kind), "") for kind in ("Image", "ClassLabel"))
    if not (image and label):
        raise UsageError(f"--data hf:{path}: its columns are {kinds}: classification needs an Image and a ClassLabel")
    train, val = (part and LabelledImages(part, image, label) for part in (parts["train"], val))
    return train, val


class LabelledImages:
    """The images of a data set as colours, uint8 [3, h, w], with their class numbers."""

    def __init__(self, data: Any, image: str, label: str) -> None:
        self._data, self._image, self._label = data, image, label
        self.classes: list[str] = data.features[label].names

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from torchvision.transforms.functional import pil_to_tensor  # slow to import

        row = self._data[index]
        return pil_to_tensor(row[self._image].convert("RGB")), int(row[self._label])

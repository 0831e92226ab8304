"""Read and check a number for each sample, such as its weight or length. No torch."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train import plain_file
from hvd_train.errors import UsageError, first_line
from hvd_train.progress.sampling import Numbers

ARGUMENTS = {"sample_weights": "weights", "length_buckets": "lengths"}
"""The arguments of Session that give the numbers themselves, by the setting that names them."""
_NPY = b"\x93NUMPY"


def read(title: str, path: Path) -> Any:
    """Return the numbers in a .npy file or a text.

    Raises UsageError, which begins with `title`.
    """
    try:
        content = plain_file.read_bytes(path)
        if content.startswith(_NPY):
            return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
        return content.decode().split()
    except OSError as error:
        raise UsageError(f"{title}: {error.strerror}") from None
    except Exception as error:  # noqa: BLE001  # a damaged .npy raises many kinds
        raise UsageError(f"{title} is neither .npy nor text ({first_line(error)})") from None


def checked(title: str, values: Any, num_samples: int) -> Numbers:
    """Return the numbers of samples as float64 [num_samples].

    Raises UsageError, which begins with `title`, for other shapes, and if a number is negative or
    not finite, or all are 0.
    """
    try:
        numbers: Numbers = np.asarray(values, np.float64).copy()  # the caller may change its own
    except (ValueError, TypeError, RuntimeError) as error:  # numpy's, and torch's for its tensors
        raise UsageError(
            f"{title}: give one number for each sample ({first_line(error)})"
        ) from None
    if numbers.shape != (num_samples,):
        raise UsageError(
            f"{title}: the shape is {list(numbers.shape)}; give one number for each of the "
            f"{num_samples} training samples"
        )
    for place in np.flatnonzero(~(numbers >= 0) | np.isinf(numbers))[:1]:
        raise UsageError(
            f"{title}: sample {place} has {numbers[place]:g}; it must be finite and at least 0"
        )
    if not numbers.any():
        raise UsageError(f"{title}: all numbers are 0")
    return numbers

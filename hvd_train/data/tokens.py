"""A data set of the tokens in a file."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hvd_train.errors import UsageError, first_line


class Tokens:
    """Windows of a file of token numbers, which is read as it is needed.

    An item is (tokens, following tokens), int64 [length] each, as `--task language-model` takes
    them. Windows do not overlap; tokens after the last whole one are left out.
    """

    def __init__(self, path: str | Path, length: int, dtype: str = "uint16") -> None:
        """`path` is an .npy file, or holds numbers of `dtype` alone.

        Raises UsageError if the file cannot be read or has no whole window.
        """
        try:
            if str(path).endswith(".npy"):
                self._tokens = np.load(path, mmap_mode="r", allow_pickle=False).reshape(-1)
            else:
                self._tokens = np.memmap(path, dtype, "r")
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"cannot read the tokens in {path}: {first_line(error)}") from None
        self.length = length
        if self._tokens.dtype.kind not in "iu" or length < 1 or not len(self):
            raise UsageError(
                f"{path} has {len(self._tokens):,} values of type {self._tokens.dtype}: windows of "
                f"{length} need {length + 1} whole numbers or more"
            )

    @property
    def largest(self) -> int:
        """The largest token in the file, which is read for that."""
        return int(self._tokens.max())

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self.length

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        """Return a window, and the same one token later."""
        number = range(len(self))[index]  # IndexError ends an iteration
        start = number * self.length
        window = torch.from_numpy(self._tokens[start : start + self.length + 1].astype(np.int64))
        return window[:-1], window[1:]

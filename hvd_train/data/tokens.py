"""Sequences of tokens from a file, for language models."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvd_train.errors import UsageError


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """The tokens of a file in sequences of `block`; an epoch has each sequence once.

    The file has integers of a numpy type one after another: `uint16` in nanoGPT's, `uint8` for the bytes of a text.
    Item i has the tokens from `i * block` on, int64 [block], and for each the one that follows, int64 [block].
    """

    def __init__(self, file: str | Path, block: int, dtype: str = "uint16") -> None:
        """Raises UsageError for a file that cannot be read or is shorter than a sequence."""
        self.file, self.block, self.dtype = Path(file), block, np.dtype(dtype)
        try:
            num_tokens = self.file.stat().st_size // self.dtype.itemsize
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None
        self._count = (num_tokens - 1) // block
        if self._count < 1:
            raise UsageError(
                f"{file} has {num_tokens} tokens of type {self.dtype}: a sequence of {block} needs one more"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        begin = index * self.block * self.dtype.itemsize
        tokens = torch.from_numpy(np.fromfile(self.file, self.dtype, self.block + 1, offset=begin).astype(np.int64))
        return tokens[:-1], tokens[1:]

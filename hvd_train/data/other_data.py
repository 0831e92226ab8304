"""Data of other tasks than classification that a machine has already: a table, pictures of shapes, and texts."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig

_TEXT_BYTES = 1 << 18  # of the documentation: as much as two cores learn from in a minute
_CANVAS, _SHAPES = 24, 3  # pixels of a side, and digits in a picture


def diabetes(config: DataConfig, seed: int) -> DataSet:
    """Return the diabetes study of Efron, Hastie, Johnstone and Tibshirani (2004), which scikit-learn ships.

    Of 442 patients it has ten numbers (age, sex, body mass index, blood pressure, six of blood serum) and how far the
    disease was a year later. Inputs and targets are in standard deviations from the mean of the training rows. One row
    in five is held out, drawn with a seed of its own.
    """
    from sklearn.datasets import load_diabetes

    raw = load_diabetes(scaled=False)
    rows, targets = torch.from_numpy(raw.data), torch.from_numpy(raw.target)
    shuffled = torch.from_numpy(np.random.default_rng(2004).permutation(len(rows)))
    held_out, train = shuffled[:88], shuffled[88:]

    def scaled(values: Tensor) -> Tensor:
        return ((values - values[train].mean(0)) / values[train].std(0)).float()

    rows, targets = scaled(rows), scaled(targets)
    of_training, of_held_out = (Arrays(rows[part], targets[part], len(part)) for part in (train, held_out))
    return DataSet(of_training, of_held_out, channels=rows.shape[1])


def digit_shapes(digits: DataSet, seed: int) -> DataSet:
    """Return pictures of 24 x 24 pixels with three digits each, and the class of each pixel: none or a digit.

    The digits are those of `digits`, in whose two parts the training pictures and the others have theirs; where they
    lie is drawn with a seed of its own, so that every run has the same pictures.
    """
    generator = np.random.default_rng(2015)
    assert isinstance(digits.train, Arrays)
    assert isinstance(digits.val, Arrays)
    train, val = _pictures(digits.train, 1600, generator), _pictures(digits.val, 320, generator)
    classes = ("none", *digits.classes)
    return DataSet(train, val, classes, channels=1, image_size=_CANVAS, mean=(0.1,), std=(0.25,))


def _pictures(digits: Arrays, count: int, generator: np.random.Generator) -> Arrays:
    """Return `count` pictures, each with three digits in three of its four quarters, and the class of each pixel."""
    images = torch.zeros(count, 1, _CANVAS, _CANVAS, dtype=torch.uint8)
    classes = torch.zeros(count, _CANVAS, _CANVAS, dtype=torch.uint8)
    half = _CANVAS // 2
    for picture in range(count):
        chosen = generator.integers(digits.rows, size=_SHAPES)
        quarters = generator.permutation(4)[:_SHAPES]
        shifts = generator.integers(half - 8 + 1, size=(_SHAPES, 2))
        for row, quarter, (down, right) in zip(chosen, quarters, shifts, strict=True):
            top, left = int(quarter) // 2 * half + int(down), int(quarter) % 2 * half + int(right)
            pixels = digits.inputs[int(row), 0]
            images[picture, 0, top : top + 8, left : left + 8] = pixels
            classes[picture, top : top + 8, left : left + 8] = (pixels >= 64) * (int(digits.targets[int(row)]) + 1)
    return Arrays(images, classes, count)


def python_docs(config: DataConfig, seed: int) -> DataSet:
    """Return a part of the texts that Python ships for its `help()`, byte by byte, in samples of one length.

    The last tenth is held out. Other versions of Python have other texts.
    """
    package = importlib.util.find_spec("pydoc_data.topics")
    if package is None or package.origin is None:
        raise UsageError(
            "--data python-docs: this Python has no pydoc_data, the texts of help(); take another data set"
        )
    text = Path(package.origin).read_bytes()[:_TEXT_BYTES]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    end = len(tokens) * 9 // 10
    length = config.sequence_length
    train, val = (_cut(part, length) for part in (tokens[:end], tokens[end:]))
    return DataSet(train, val, vocabulary=256)


def _cut(tokens: Tensor, length: int) -> Arrays:
    """Return samples of `length` tokens, and the token after each: inputs and targets, int64 [samples, length]."""
    count = (len(tokens) - 1) // length
    if count < 1:
        raise UsageError(f"--sequence-length {length} is longer than the text, of {len(tokens):,} tokens")
    inputs, targets = (tokens[begin : begin + count * length].view(count, length) for begin in (0, 1))
    return Arrays(inputs, targets, count)


def tokens(config: DataConfig, seed: int) -> DataSet:
    """Return the tokens in a folder: those of train.bin and val.bin (uint16), or of train.npy and val.npy.

    A sample is a piece of `sequence_length` tokens, in the order of the file. Raises UsageError where there is no file,
    or where it has not one sample.
    """
    assert config.data_dir is not None  # checked by DataConfig
    folder, length = config.data_dir, config.sequence_length
    train, val = (_open_tokens(folder, part, length) for part in ("train", "val"))
    if train is None:
        raise UsageError(f"--data tokens: {folder} has neither train.bin (uint16) nor train.npy")
    return DataSet(train, val)


def _open_tokens(folder: Path, part: str, length: int) -> TokenFile | None:
    found = [folder / f"{part}{ending}" for ending in (".bin", ".npy") if (folder / f"{part}{ending}").is_file()]
    if not found:
        return None
    path = found[0]
    try:
        file = TokenFile(path, length)
        if len(file) < 1:
            raise UsageError(
                f"{path} has {file.num_tokens:,} tokens, and a sample is {length} and the one that follows"
            )
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the tokens in {path}: {error}") from None
    return file


@dataclass(frozen=True)
class TokenFile:
    """Samples of `length` tokens of a file that stays on disk: each process maps it into its memory."""

    path: Path
    length: int

    def __len__(self) -> int:
        return (self.num_tokens - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * self.length
        piece = torch.from_numpy(self._mapped()[begin : begin + self.length + 1].astype(np.int64))
        return piece[:-1], piece[1:]

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the file."""
        return len(self._mapped())

    def _mapped(self) -> npt.NDArray[np.integer]:
        return tokens_in(self.path, self.path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)  # opened once in each process, not for each sample
def tokens_in(path: Path, changed: int) -> npt.NDArray[np.integer]:
    """Return the tokens of a file that was `changed` last at this time, mapped into memory.

    Raises ValueError where the file has no whole numbers, or not one after the other.
    """
    if path.suffix == ".bin":
        return np.memmap(path, dtype=np.uint16, mode="r")
    array: npt.NDArray[np.integer] = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"an array of {array.dtype} with {array.ndim} dimensions, and not one of whole numbers with 1")
    return array

"""Data of other tasks: what they hold, that the two parts share nothing, and files of tokens that cannot be read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes

from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.other_data import TokenFile
from hvd_train.data.sources import open_data
from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig


@functools.cache
def opened(name: str, seed: int = 0) -> DataSet:
    return open_data(DataConfig(data=name), seed)


def parts_of(data: DataSet) -> tuple[Arrays, Arrays]:
    assert isinstance(data.train, Arrays)
    assert isinstance(data.val, Arrays)
    return data.train, data.val


def test_diabetes_is_in_standard_deviations_of_the_training_part() -> None:
    """All 442 rows are there once, scaled by what training may know of them."""
    data = opened("diabetes")
    train, val = parts_of(data)
    assert (len(train), len(val), data.channels, data.classes) == (354, 88, 10, ())
    for values in (train.inputs, train.targets.unsqueeze(1)):
        assert values.dtype == torch.float32
        assert torch.allclose(values.mean(0), torch.zeros(()), atol=1e-6)
        assert torch.allclose(values.std(0), torch.ones(()), atol=1e-5)
    assert val.inputs.mean(0).abs().max() > 0.01, "the other part is not scaled by itself"
    raw = load_diabetes(scaled=False)
    whole = torch.from_numpy(np.column_stack([raw.data, raw.target]))
    found = torch.cat([torch.column_stack([part.inputs, part.targets]) for part in (train, val)]).double()
    slope = (whole.amax(0) - whole.amin(0)) / (found.amax(0) - found.amin(0))
    back = (found - found.amin(0)) * slope + whole.amin(0)
    distance, nearest = torch.cdist(back, whole).min(1)
    assert distance.max() < 0.01
    assert len({*nearest.tolist()}) == 442


def test_every_run_has_the_same_data() -> None:
    """Which rows are held out does not depend on the seed of the run."""
    for name in ("diabetes", "digit-shapes"):
        (first, _), (second, _) = (parts_of(opened(name, seed)) for seed in (0, 1))
        assert torch.equal(first.inputs, second.inputs)
        assert torch.equal(first.targets, second.targets)


def _quarters(part: Arrays) -> list[tuple[bytes, set[int]]]:
    """Return of each quarter with a digit its pixels, without empty edges, and the classes of its pixels."""
    found = []
    for image, classes in zip(part.inputs[:, 0], part.targets, strict=True):
        for top in (0, 12):
            for left in (0, 12):
                piece, of_piece = (whole[top : top + 12, left : left + 12] for whole in (image, classes))
                if piece.any():
                    found.append((_cropped(piece), set(of_piece.flatten().tolist()) - {0}))
    return found


def _cropped(image: torch.Tensor) -> bytes:
    rows, columns = (image.any(dim).nonzero() for dim in (1, 0))
    inner = image[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    return bytes(inner.shape) + inner.contiguous().numpy().tobytes()


def test_digit_shapes_are_three_digits_of_their_own_part() -> None:
    """A digit of a training picture comes from the training digits, and is of their class; so it is with the others."""
    digits = opened("digits")
    data = opened("digit-shapes")
    assert data.classes == ("none", *digits.classes)
    sources = [
        {_cropped(image[0]): int(label) for image, label in zip(part.inputs, part.targets, strict=True)}
        for part in parts_of(digits)
    ]
    assert not sources[0].keys() & sources[1].keys()
    for part, known, count in zip(parts_of(data), sources, (1600, 320), strict=True):
        quarters = _quarters(part)
        assert len(quarters) == 3 * count
        for pixels, classes in quarters:
            assert classes == {known[pixels] + 1}


def test_the_classes_of_pixels_agree_with_the_pixels() -> None:
    """A pixel is of a digit where it is at least a quarter as bright as can be, and else of none."""
    for part in parts_of(opened("digit-shapes")):
        assert part.inputs.shape[1:] == (1, 24, 24)
        assert part.inputs.dtype == part.targets.dtype == torch.uint8
        assert torch.equal(part.targets > 0, part.inputs[:, 0] >= 64)
        assert sorted({*part.targets.flatten().tolist()}) == [*range(11)]


def test_python_docs_are_pieces_of_a_text_and_the_byte_after_each() -> None:
    """The parts follow each other in the text, whose last tenth is held out; no sample is shorter than the others."""
    import pydoc_data.topics

    text = Path(pydoc_data.topics.__file__).read_bytes()[: 1 << 18]
    data = open_data(DataConfig(data="python-docs", sequence_length=100), seed=0)
    assert data.vocabulary == 256
    for part, piece in zip(parts_of(data), (text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]), strict=True):
        assert part.inputs.shape == part.targets.shape == ((len(piece) - 1) // 100, 100)
        assert part.inputs.dtype == torch.int64
        assert bytes(part.inputs.flatten().tolist()) == piece[: part.inputs.numel()]
        assert bytes(part.targets.flatten().tolist()) == piece[1 : part.targets.numel() + 1]


def tokens(length: int) -> DataSet:
    return open_data(DataConfig(data="tokens", data_dir=Path(), sequence_length=length), seed=0, of_classes=False)


@pytest.mark.parametrize("kind", ["bin", "npy"])
def test_tokens_come_from_the_file(kind: str) -> None:
    """Samples follow each other, the last one only if the token after it is there; val may be missing."""
    numbers = np.arange(65_530, 65_530 + 13) % 65_536
    if kind == "bin":
        numbers.astype(np.uint16).tofile("train.bin")
    else:
        np.save("train.npy", numbers.astype(np.int32))
    data = tokens(4)
    assert data.val is None
    assert isinstance(data.train, TokenFile)
    samples = [data.train[index] for index in range(len(data.train))]
    assert [inputs.tolist() for inputs, _ in samples] == numbers[:12].reshape(3, 4).tolist()
    assert [targets.tolist() for _, targets in samples] == numbers[1:13].reshape(3, 4).tolist()
    assert {tensor.dtype for sample in samples for tensor in sample} == {torch.int64}
    np.save("val.npy", np.zeros(5, dtype=np.uint8))
    assert len(tokens(4).val or ()) == 1


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "missing": (lambda: None, r"--data tokens: \. has neither train\.bin \(uint16\) nor train\.npy"),
    "short": (
        lambda: np.zeros(4, dtype=np.uint16).tofile("train.bin"),
        r"train\.bin has 4 tokens, and a sample is 4 and the one that follows",
    ),
    "short val": (
        lambda: [Path(f"{part}.bin").write_bytes(bytes(2 * n)) for part, n in (("train", 9), ("val", 3))],
        r"val\.bin has 3 tokens, and a sample is 4 and the one that follows",
    ),
    "empty": (lambda: Path("train.bin").touch(), r"cannot read the tokens in train\.bin: .*empty"),
    "half a token": (lambda: Path("train.bin").write_bytes(b"odd"), r"cannot read the tokens in train\.bin: .*"),
    "two dimensions": (
        lambda: np.save("train.npy", np.zeros((3, 9), dtype=np.int64)),
        r"train\.npy: an array of int64 with 2 dimensions, and not one of whole numbers with 1",
    ),
    "floats": (
        lambda: np.save("train.npy", np.zeros(9)),
        r"train\.npy: an array of float64 with 1 dimensions, and not one of whole numbers with 1",
    ),
    "objects": (
        lambda: np.save("train.npy", np.array(["a", {}], dtype=object), allow_pickle=True),
        r"cannot read the tokens in train\.npy: .*",
    ),
    "no array": (lambda: Path("train.npy").write_text("text"), r"cannot read the tokens in train\.npy: .*"),
    "a folder": (lambda: Path("train.npy").mkdir(), r"has neither train\.bin"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_hold_no_tokens_are_refused(name: str) -> None:
    """In one line with the name of the file."""
    make, words = WRONG[name]
    make()
    with pytest.raises(UsageError, match=words) as told:
        tokens(4)
    assert "\n" not in str(told.value)


def test_a_text_shorter_than_a_sample_is_refused() -> None:
    """With its length."""
    with pytest.raises(UsageError, match=r"--sequence-length 300000 is longer than the text, of [\d,]+ tokens"):
        open_data(DataConfig(data="python-docs", sequence_length=300_000), seed=0)
    with pytest.raises(UsageError, match="--sequence-length is 0; it must be at least 1"):
        DataConfig(data="python-docs", sequence_length=0)

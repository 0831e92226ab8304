"""Rows of Arrow files: several files, files that change, and numbers as tensors."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pytest
import torch

from hvd_train.data.arrow_rows import ArrowFiles, ArrowTokens, tensor_of
from hvd_train.errors import UsageError


def written(name: str, rows: Sequence[object], batch: int = 2) -> str:
    """Write a column `x` in batches, as `datasets` does, and return the path of the file."""
    table = pyarrow.table({"x": rows})
    with pyarrow.OSFile(name, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=batch)
    return name


def test_rows_of_several_files_follow_one_another() -> None:
    """Also in a process that is sent them, which opens the files anew."""
    files = ArrowFiles("rows", [written("a", [[1, 2], [3, 4], [5, 6]]), written("b", [[7, 8]])])
    tokens = ArrowTokens(files, "x")
    for one in (tokens, pickle.loads(pickle.dumps(tokens))):
        assert len(one) == 4
        assert [(inputs.item(), targets.item()) for inputs, targets in map(one.__getitem__, range(4))] == [
            (1, 2), (3, 4), (5, 6), (7, 8),
        ]  # fmt: skip


def test_a_file_that_changes_under_a_training_is_named() -> None:
    """A process that opens it later does not train on other rows."""
    files = ArrowFiles("rows", [written("a", [1, 2])])
    assert len(files) == 2
    os.utime("a", ns=(1, 1))
    again = pickle.loads(pickle.dumps(files))
    with pytest.raises(UsageError, match="a has changed since the training has begun: start it again"):
        len(again)


def test_places_of_values_that_lead_out_of_the_file_are_refused() -> None:
    """Before any value is read: pyarrow would read whatever is in memory there."""
    path = Path(written("a", [b"abc", b"defg"]))
    content = path.read_bytes()
    places = (0).to_bytes(4, "little") + (3).to_bytes(4, "little") + (7).to_bytes(4, "little")
    assert content.count(places) == 1
    path.write_bytes(content.replace(places, places[:8] + (1 << 30).to_bytes(4, "little")))
    with pytest.raises(UsageError, match="rows: the column x is damaged"):
        ArrowFiles("rows", ["a"]).check("x")


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (3, pyarrow.uint16(), torch.tensor(3)),
        (0.5, pyarrow.float64(), torch.tensor(0.5)),
        ([True, False], pyarrow.list_(pyarrow.bool_()), torch.tensor([True, False])),
        ([1, 2], pyarrow.list_(pyarrow.int8(), 2), torch.tensor([1, 2])),
        ([1, 2], pyarrow.large_list(pyarrow.uint8()), torch.tensor([1, 2], dtype=torch.uint8)),
        ([[1.0], [2.0]], pyarrow.list_(pyarrow.list_(pyarrow.float16())), torch.tensor([[1.0], [2.0]])),
    ],
)
def test_numbers_and_lists_are_tensors(values: object, kind: pyarrow.DataType, expected: torch.Tensor) -> None:
    """Of the type in which networks take them, and in memory that may be written to."""
    found = tensor_of(pyarrow.array([values], type=kind)[0])
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype
    found += found


def test_uneven_lists_are_refused() -> None:
    """Those inside a row."""
    with pytest.raises(UsageError, match="lists of several lengths"):
        tensor_of(pyarrow.array([[[1], [2, 3]]])[0])

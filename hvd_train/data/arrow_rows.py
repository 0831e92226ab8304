"""Rows of Arrow files, in which Hugging Face's `datasets` keeps data: images, texts as tokens, and tensors.

The files stay on disk: each process maps them into its memory, of which the kernel keeps one copy for all. Loader
processes import pyarrow alone, which takes a tenth of the time that `datasets` takes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hvd_train.data.encoded import EncodedImages, Look, unreadable
from hvd_train.data.pictures import UNREADABLE, Picture
from hvd_train.errors import UsageError

if TYPE_CHECKING:
    import pyarrow


class ArrowFiles:
    """The table in files that hold one part of it each; `title` is what its rows are called in errors."""

    def __init__(self, title: str, files: Sequence[str]) -> None:
        """Raises OSError where a file is not there."""
        self.title = title
        self._files = tuple((file, *_identity(file)) for file in files)
        self._columns: dict[str, Any] = {}
        self._table: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a loader process gets, which maps the files itself."""
        return {**self.__dict__, "_table": None, "_columns": {}}

    def __len__(self) -> int:
        rows: int = self._mapped().num_rows
        return rows

    def column(self, name: str) -> pyarrow.ChunkedArray:
        """Return a column as it is stored. Raises UsageError where a file is damaged, or another one by now."""
        if name not in self._columns:
            import pyarrow

            column = self._mapped().column(name)
            if isinstance(column.type, pyarrow.BaseExtensionType):
                stored = [chunk.storage for chunk in column.chunks]
                column = pyarrow.chunked_array(stored, column.type.storage_type)
            self._columns[name] = column
        return self._columns[name]

    def check(self, name: str) -> None:
        """Raise UsageError where a column is damaged, or lacks a value. Values themselves are not read.

        pyarrow trusts what stands in a file about where values begin and end.
        """
        import pyarrow

        column = self.column(name)
        try:
            column.validate(full=True)
        except pyarrow.ArrowException as error:
            raise UsageError(f"{self.title}: the column {name} is damaged: {_first_line(error)}") from None
        if column.null_count:
            raise UsageError(f"{self.title}: the column {name} has no value in {column.null_count:,} rows")

    def _mapped(self) -> Any:
        if self._table is None:
            import pyarrow

            parts = []
            for file, size, changed in self._files:
                try:
                    if _identity(file) != (size, changed):
                        raise UsageError(f"{file} has changed since the training has begun: start it again")
                    with pyarrow.memory_map(file) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                        parts.append(stream.read_all())
                except (OSError, pyarrow.ArrowException) as error:
                    raise UsageError(f"cannot read {file}: {_first_line(error)}") from None
            self._table = pyarrow.concat_tables(parts)
        return self._table


class ArrowImages(EncodedImages):
    """The encoded images of a column: bytes, or, as `datasets` keeps images, bytes and the name of a file."""

    def __init__(self, rows: ArrowFiles, column: str, labels: Tensor, look: Look) -> None:
        super().__init__(labels, look)
        self._rows, self._column = rows, column

    @override
    def name(self, index: int) -> str:
        return f"{self._column} of row {index} of {self._rows.title}"

    @override
    def read(self, index: int) -> bytes:
        return content_of(self._rows.column(self._column)[index])


class ArrowRows:
    """Rows as pairs of inputs and targets: a tensor for one column, a dict of tensors for several.

    Whole numbers become int64, fractions float32, bytes (uint8) stay as they are; images are [3, height, width] uint8.
    """

    def __init__(
        self, rows: ArrowFiles, inputs: Sequence[str], target: str, labels: Tensor | None, max_pixels: int
    ) -> None:
        """Take `labels`, the numbers of classes, in place of the column `target`, unless they are None.

        Images of more than `max_pixels` pixels count as unreadable.
        """
        self._rows, self._inputs, self._target, self._labels = rows, tuple(inputs), target, labels
        self._max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return an item. Raises UsageError that names the row where an image in it cannot be read."""
        values = {name: self._value(name, index) for name in self._inputs}
        inputs = values if len(values) > 1 else next(iter(values.values()))
        return inputs, self._value(self._target, index) if self._labels is None else int(self._labels[index])

    def _value(self, name: str, index: int) -> Tensor:
        value = self._rows.column(name)[index]
        if is_image(value.type):
            try:
                picture = Picture(content_of(value), self._max_pixels)
                return picture.part(0, 0, picture.width, picture.height)
            except UNREADABLE as error:
                raise unreadable(f"{name} of row {index} of {self._rows.title}", error) from None
        return tensor_of(value)


class ArrowTokens:
    """Rows of tokens: all but the last of a row are its inputs, and all but the first its targets."""

    def __init__(self, rows: ArrowFiles, column: str) -> None:
        self._rows, self._column = rows, column

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = tensor_of(self._rows.column(self._column)[index]).long()
        return row[:-1], row[1:]


def is_image(kind: pyarrow.DataType) -> bool:
    """Return whether a column of this type may hold encoded images."""
    import pyarrow.types

    if pyarrow.types.is_struct(kind):
        return {kind.field(number).name for number in range(kind.num_fields)} == {"bytes", "path"}
    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))


def content_of(value: Any) -> bytes:
    """Return the bytes of an encoded image."""
    found = value.as_py()
    content: bytes = found["bytes"] if isinstance(found, dict) else found
    return content


def tensor_of(value: Any) -> Tensor:
    """Return a number, or a list of numbers or of such lists, as a tensor. Raises UsageError for uneven lists."""
    values = getattr(value, "values", None)
    if values is not None and not hasattr(values.type, "value_type"):
        array = values.to_numpy(zero_copy_only=False)
    else:
        try:
            array = np.asarray(value.as_py(), dtype=None if values is None else _innermost(values.type))
        except (ValueError, TypeError) as error:
            raise UsageError(f"a row of the data has lists of several lengths: {_first_line(error)}") from None
    if array.dtype.kind == "f":
        return torch.from_numpy(array.astype(np.float32))
    if array.dtype.kind in "iu" and array.dtype != np.uint8:
        return torch.from_numpy(array.astype(np.int64))
    return torch.from_numpy(np.array(array))  # a copy: what is mapped cannot be written to


def _innermost(kind: Any) -> Any:
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return kind.to_pandas_dtype()


def _identity(file: str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

"""Send the user's objects to loader processes, which do not run the user's script again."""

import io
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import cloudpickle


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles what a script or a function defines by value, and shares the memory of tensors as torch does."""

    dispatch_table: ClassVar[Any] = ChainMap(
        cloudpickle.Pickler.dispatch_table,
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
    )


class ByValue:
    """Becomes `thing` in the process that it is sent to."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        content = io.BytesIO()
        _Pickler(content).dump(self._thing)
        return pickle.loads, (content.getvalue(),)


@contextmanager
def without_script() -> Iterator[None]:
    """Let processes that start inside this block not import the user's script, which would begin to train there."""
    script, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script

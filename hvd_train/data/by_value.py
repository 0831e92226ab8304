"""Send the user's objects to loader processes, which do not run the user's script again."""

import io
import pickle
from collections import ChainMap
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

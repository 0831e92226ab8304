"""Send the user's objects to loader processes, which do not run the user's script again."""

import hashlib
import io
import pickle
from collections import ChainMap
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import cloudpickle
from torch import Tensor

from hvd_train.data.random_numbers import seed_all


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles what a script or a function defines by value, and shares the memory of tensors as torch does."""

    dispatch_table: ClassVar[Any] = ChainMap(
        cloudpickle.Pickler.dispatch_table,
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
    )


class ByValue:
    """Becomes `thing` in the process that it is sent to, where modules are imported with the same seed as here."""

    def __init__(self, thing: Any, seed: int) -> None:
        self._thing = thing
        self._seed = seed

    def __reduce__(self) -> tuple[Any, tuple[bytes, int]]:
        content = io.BytesIO()
        _Pickler(content).dump(self._thing)
        return _received, (content.getvalue(), self._seed)


def _received(content: bytes, seed: int) -> Any:
    seed_all(seed)
    return pickle.loads(content)  # noqa: S301  # it comes from this process's parent


def _place(tensor: Tensor) -> tuple[Any, tuple[str]]:
    is_shared = tensor.is_shared()  # type: ignore[no-untyped-call]
    where = tensor.data_ptr(), is_shared, tensor.shape, tensor.stride(), tensor.dtype
    return str, (repr(where),)


class _Places(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles where tensors are in place of their values: processes share their memory."""

    dispatch_table: ClassVar[Any] = ChainMap({Tensor: _place}, cloudpickle.Pickler.dispatch_table)


class _Hash:
    """A file whose content is only hashed: a data set may fill half of the memory."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.write = self._hash.update

    def __str__(self) -> str:
        return self._hash.hexdigest()


def digest_of_pickle(thing: Any) -> str | None:
    """Return a digest that changes if `thing` must be sent again; None if that cannot be known."""
    file = _Hash()
    try:
        _Places(file).dump(thing)
    except Exception:  # noqa: BLE001  # it may raise anything, for instance for an open file
        return None
    return str(file)

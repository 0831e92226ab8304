"""The floating-point operations of a pass through the model, forward and backward, as torch counts them."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from hvd_train.network.trial_passes import Trial, pass_once

_TORCHS_OWN = ("aten", "prim", "prims", "profiler")
# Of torch's own operators without a formula nearly all touch each number a few times. These do more than that.
_HEAVY = re.compile(
    r"rnn|fft|sparse_(add)?mm|linalg_(?!vector_norm)|cdist|trilinear|grouped_mm|\b(add)?mv\b|\baddbmm\b"
)


@dataclass(frozen=True)
class Operations:
    """The floating-point operations of a pass over some samples; a multiplication and an addition are two."""

    total: int
    in_convolutions: int
    """Those of them that are of convolutions."""
    uncounted: tuple[str, ...] = ()
    """Operators of the pass with much work for which torch has no formula, so that they are not in `total`."""


def operations_of(trial: Trial) -> Operations:
    """Return the operations of a pass over the samples, forward and backward; nothing changes, as in `pass_once`.

    Counted are products of matrices, convolutions and attention: elementwise operators take next to none. Raises what
    the model raises.
    """
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    seen = _OperatorsSeen()
    with warnings.catch_warnings(), _uncompiled():
        warnings.simplefilter("ignore")  # of hooks, by which torch counts
        with FlopCounterMode(display=False) as counter, seen:
            pass_once(trial)
    by_operator: Mapping[Any, int] = counter.get_flop_counts().get("Global", {})
    of_convolutions = sum(count for operator, count in by_operator.items() if "conv" in str(operator))
    uncounted = _heavy(seen.names - {str(operator).replace(".", "::") for operator in counter.flop_registry})
    return Operations(sum(by_operator.values()), of_convolutions, uncounted)


def fp32_format(operations: Operations) -> Literal["fp32", "tf32"]:
    """Return the format in which an NVIDIA GPU multiplies most of the numbers of a pass in fp32.

    torch may have it use TF32, as set for convolutions (where that is the default) and for other products.
    """
    of_convolutions = 2 * operations.in_convolutions > operations.total
    return "tf32" if _may_use_tf32(of_convolutions=of_convolutions) else "fp32"


def _may_use_tf32(*, of_convolutions: bool) -> bool:
    settings: Any = torch.backends.cudnn if of_convolutions else torch.backends.cuda.matmul
    newer = getattr(settings, "conv", settings)  # of torch 2.9 and later, which may refuse to read the older one
    if hasattr(newer, "fp32_precision"):
        return bool(newer.fp32_precision == "tf32")
    return bool(settings.allow_tf32)


def _uncompiled() -> AbstractContextManager[object]:
    """Return the context in which what is compiled runs as it was written: compiled code has kernels nobody sees."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to import it takes seconds
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def _heavy(names: Iterable[str]) -> tuple[str, ...]:
    """Return those operators (`aten::fft`) that do much work, in order; those of other libraries count as such."""
    return tuple(
        name
        for name in sorted(names)
        if (name.partition("::")[0] not in _TORCHS_OWN or _HEAVY.search(name))
        and not name.endswith("_backward")  # it is named by its forward pass
    )


class _OperatorsSeen(TorchDispatchMode):
    """Keeps the names of the operators that are called inside the block, without their overloads."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))

"""Compare the gradients of micro-batches that two ranks have computed.

A micro-batch is a pure function of the weights and its number, so any rank can compute it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hvd_train.errors import sendable
from hvd_train.run_files.environment import processor
from hvd_train.world.world import numbers_in

NOT_COMPARED = (
    "no rank computes a micro-batch of another one again, so a machine that computes wrongly may "
    "stay unnoticed: {}"
)
# Ranks with other processors or numbers of threads add up in another order. The error of a sum of
# n numbers is below n * eps of their magnitudes, and about its root in practice (Higham, "Accuracy
# and stability of numerical algorithms", chapter 4): these are sums of four million numbers. Half
# precision also rounds what a layer returns, here in 256 layers.
_OF_SUMS = 2**11 * torch.finfo(torch.float32).eps
_OF_LAYERS = {
    "fp32": 0.0,
    "fp16": 2**4 * torch.finfo(torch.float16).eps,
    "bf16": 2**4 * torch.finfo(torch.bfloat16).eps,
}


@sendable
@dataclass(frozen=True)
class Pass:
    """What a rank has computed of a micro-batch.

    For each parameter, `norms` has the 2-norm of the gradient, and `sums` the sum of its numbers
    over the root of their count, which also shows a sign.
    """

    number: int  # of the micro-batch
    norms: tuple[float, ...]
    sums: tuple[float, ...]


@sendable
@dataclass(frozen=True)
class Passes:
    """What a rank has computed for a comparison."""

    machine: str  # ranks with the same one get the same bits; empty: they may not
    is_again: bool  # whether two passes of this step have differed before
    is_right: bool  # whether its device computes whole numbers rightly
    own: Pass | None  # its first micro-batch
    other: Pass | None  # a micro-batch of another rank


@dataclass(frozen=True)
class Difference:
    """Two ranks have computed a micro-batch differently."""

    ranks: tuple[int, int]  # the owner, and the one that computed it again
    number: int  # of the micro-batch
    parameter: int  # the one that differs most
    size: float  # by how much, relative to the norm of the whole gradient


def machine_of(device: torch.device) -> str:
    """Return what decides the last bits of a gradient on this rank; empty if it is more."""
    if device.type == "cpu":
        return f"{processor()}, {torch.get_num_threads()} threads"
    is_fixed = torch.are_deterministic_algorithms_enabled()
    return torch.cuda.get_device_name(device) if is_fixed else ""


@torch.no_grad()
def noted(number: int, parameters: Sequence[nn.Parameter]) -> Pass:
    """Return the pass that gave these parameters the gradients that they have now."""
    norms = list[Tensor]()
    sums = list[Tensor]()
    for parameter in parameters:
        nothing = torch.zeros(1, device=parameter.device)
        numbers = nothing if parameter.grad is None else numbers_in(parameter)
        norms.append(torch.linalg.vector_norm(numbers, dtype=torch.float64))
        sums.append(numbers.sum(dtype=torch.float64) / math.sqrt(max(1, numbers.numel())))
    if not norms:
        return Pass(number, (), ())
    # one copy from the device
    of_norms, of_sums = torch.stack([*norms, *sums]).view(2, -1).tolist()
    return Pass(number, tuple(of_norms), tuple(of_sums))


def rounding(arithmetic: str) -> float:
    """Return by how much of its norm a gradient may differ between machines in this arithmetic."""
    return _OF_SUMS + _OF_LAYERS[arithmetic]


def differences(of_ranks: Sequence[Passes], bound: float) -> list[Difference]:
    """Return where ranks have computed the same micro-batch differently.

    Gradients may differ by this part of their norm; the first time, if all ranks have the same
    machine, not at all.
    """
    machines = {passes.machine for passes in of_ranks}
    if not is_again(of_ranks) and len(machines) == 1 and "" not in machines:
        bound = 0.0
    owners = {passes.own.number: rank for rank, passes in enumerate(of_ranks) if passes.own}
    found = list[Difference]()
    for rank, passes in enumerate(of_ranks):
        other = passes.other
        if other is None or other.number not in owners:
            continue
        owner = owners[other.number]
        own = of_ranks[owner].own
        assert own is not None
        parameter, size = _largest(own, other)
        if size > bound:
            found.append(Difference((owner, rank), other.number, parameter, size))
    return found


def is_again(of_ranks: Sequence[Passes]) -> bool:
    """Return whether two passes of this step have differed before: newcomers do not know."""
    return any(passes.is_again for passes in of_ranks)


def _largest(one: Pass, other: Pass) -> tuple[int, float]:
    """Return the parameter whose gradients differ most, and by how much of the whole norm."""
    whole = math.hypot(*filter(math.isfinite, one.norms)) or 1.0
    of_norms = map(_distance, one.norms, other.norms)
    of_sums = map(_distance, one.sums, other.sums)
    sizes = [max(distances) / whole for distances in zip(of_norms, of_sums, strict=True)]
    parameter = max(range(len(sizes)), key=sizes.__getitem__)
    return parameter, sizes[parameter]


def _distance(one: float, other: float) -> float:
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other)
    # a loss scale that is too large makes both of them infinite
    return 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf


def wrong_rank(found: Sequence[Difference], of_ranks: Sequence[Passes]) -> int | None:
    """Return the one rank that computes whole numbers wrongly, or else the one that all
    differences have in common, if another rank shows it.
    """
    if len(wrong := [rank for rank, passes in enumerate(of_ranks) if not passes.is_right]) == 1:
        return wrong[0]
    common = set.intersection(*({*difference.ranks} for difference in found))
    return common.pop() if len(of_ranks) > 2 and len(found) > 1 and len(common) == 1 else None

"""Sums of gradients as 64-bit integers, which do not depend on the order of the additions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from hvd_train.errors import SumsOverflow
from hvd_train.world.world import Gradients, PendingSum, World, real

_SUM_BITS = 62  # of the largest sum over all micro-batches
_MARGIN = 6  # bits by which the norm of a gradient may exceed the norm of the last sum
_LEAST = -60  # the least exponent of a norm; a float32 has room for its scale
_ON_CPU = 1 << 15  # numbers that stay in the cache of a core between two operations
_PIECE = 1 << 22  # integers that are sent at once


class ExactSums:
    """The sums of an update's gradients over its micro-batches and ranks.

    The gradient g of a micro-batch becomes the integers g * 2^k, cut off, which are added. Each
    parameter has its own k: the 2-norm N of its last sum times 2^k is near 2^(56 - log2 n) in a
    step of n micro-batches, so the error of a sum is below n * N * 2^(log2 n - 55). If a gradient
    is too large for its k, all ranks raise SumsOverflow, and take the step again with other
    exponents.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._layouts = dict[str, _Layout]()  # by update
        self._larger = dict[str, int]()  # exponents for the next attempt at an update
        self.exponents = dict[str, int]()
        """The exponents of the norms of this update, after `reduce`, for the next one."""

    def begin(
        self,
        update: str,
        parameters: Mapping[str, nn.Parameter],
        num_micro_batches: int,
        exponents: Mapping[str, int],
    ) -> None:
        """Begin an update of these parameters, by name, in this many micro-batches of all ranks.

        `exponents` has the exponents after the last update of each parameter.
        """
        layout = self._layouts.get(update)
        if layout is None or layout.ids != [*map(id, parameters.values())]:
            layout = self._layouts[update] = _Layout(update, parameters)
        layout.begin()
        self._layout = layout
        known = {**exponents, **self._larger}
        self._larger = {}
        self.exponents = {key: known.get(key, _LEAST) for key in layout.keys}
        bits = _SUM_BITS - _MARGIN - math.ceil(math.log2(max(1, num_micro_batches)))
        self._scales = [2.0 ** (bits - exponent) for exponent in self.exponents.values()]
        limits = [2.0 ** (exponent + _MARGIN) for exponent in self.exponents.values()]
        self._limits = torch.tensor(limits, dtype=torch.float64, device=layout.sums.device)
        self._pending = list[PendingSum]()

    @torch.no_grad()
    def end_pass(self) -> None:
        """Add the gradients of a backward pass, and leave none."""
        layout = self._layout
        gradients = {
            number: layout.flat_gradient(number)
            for number, parameter in enumerate(layout.parameters)
            if parameter.grad is not None
        }
        if not gradients:
            return
        layout.note_norms([*gradients], torch._foreach_norm([*gradients.values()]), self._limits)
        for number, gradient in gradients.items():
            layout.add(number, gradient, self._scales[number])
            layout.parameters[number].grad = None

    def start(self) -> None:
        """Start the sums over all ranks, after the last pass of this one. Raises RankLost."""
        layout = self._layout
        layout.clear_missing()
        # All ranks agree on a name and a length once.
        name = f"exact.{layout.update}.{len(layout.sums)}"
        self._pending = [
            self._world.start_sum(piece, f"{name}.{number}")
            for number, piece in enumerate(torch.split(layout.sums, _PIECE))
        ]
        self._pending.append(self._world.start_sum(layout.counts.view(-1), f"{name}.counts"))

    @torch.no_grad()
    def reduce(self) -> Gradients:
        """Wait for the sums, which become the gradients, and return them.

        Raises RankLost; SumsOverflow on all ranks if a gradient was too large for its exponent.
        """
        layout = self._layout
        *sums, counts = [wait() for wait in self._pending]
        given, broken, large = counts.view_as(layout.counts).tolist()
        if any(large) and not any(broken):
            self._larger = self._exponents_of_all_ranks(large)
            raise SumsOverflow
        norms = layout.receive(sums, self._scales)
        if not layout.is_shared and layout.sums.device.type == "cpu":
            # All ranks are here with the same parameters.
            layout.share(self._world.share(layout.sums.nbytes))
        for number, parameter in enumerate(layout.parameters):
            if broken[number] or large[number]:
                layout.results[number].fill_(math.nan)
            parameter.grad = layout.gradient_of(number) if given[number] else None
        if not any(broken):  # else the step is skipped, and other sums may have overflowed
            for key, norm in zip(layout.keys, norms, strict=True):
                self.exponents[key] = _exponent(norm, self.exponents[key])
        results = [result for result, count in zip(layout.results, given, strict=True) if count]
        squares = math.nan if any(broken) else math.fsum(norm * norm for norm in norms)
        return Gradients(results, squares)

    def _exponents_of_all_ranks(self, large: Sequence[int]) -> dict[str, int]:
        """Return exponents for the parameters of these numbers whose gradients were too large."""
        of_ranks = self._world.gather(self._layout.norms.tolist(), "a step")
        norms = map(max, zip(*of_ranks, strict=True))
        return {
            key: _exponent(norm, _LEAST)
            for key, norm, count in zip(self._layout.keys, norms, large, strict=True)
            if count
        }


def _exponent(norm: float, before: int) -> int:
    """Return the exponent of the power of two above a norm; the one before for 0 and no number."""
    return max(_LEAST, math.frexp(norm)[1]) if 0 < norm < math.inf else before


class _Layout:
    """The integers of an update's parameters, in one flat tensor, and the gradients made of them.

    `parameters` are given by name.
    """

    def __init__(self, update: str, parameters: Mapping[str, nn.Parameter]) -> None:
        self.update = update
        self.parameters = [*parameters.values()]
        self.ids = [*map(id, self.parameters)]
        self.keys = [f"{update}:{name}" for name in parameters]
        numbers = [real(parameter.detach()) for parameter in self.parameters]
        # as autograd gives a gradient: without gaps
        self._strides = [torch.empty_like(each, device="meta").stride() for each in numbers]
        self._shapes = [each.shape for each in numbers]
        sizes = [each.numel() for each in numbers]
        device = numbers[0].device if numbers else None
        self.sums = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._parts = torch.split(self.sums, sizes)
        self.is_shared = False  # whether ranks of this world have tried to share memory for it
        self.results = [
            torch.zeros(each.numel(), dtype=each.dtype, device=device) for each in numbers
        ]
        # passes with a gradient, with one that is not finite, and with one that is too large
        self.counts = torch.zeros(3, len(sizes), dtype=torch.int64, device=device)
        self.norms = torch.zeros(len(sizes), dtype=torch.float64, device=device)  # the largest

    def share(self, memory: Tensor | None) -> None:
        """Let the next sums lie in this memory, [bytes of `sums`] uint8, if there is any."""
        self.is_shared = True
        if memory is not None:
            self.sums = memory.view(torch.int64)
            self._parts = torch.split(self.sums, [*map(len, self.results)])

    def begin(self) -> None:
        """Clear what the last update has left."""
        self.counts.zero_()
        self.norms.zero_()
        self._has = [False] * len(self.parameters)

    def flat_gradient(self, number: int) -> Tensor:
        """Return the numbers of a gradient in their order in `sums`."""
        gradient = self.parameters[number].grad
        assert gradient is not None
        numbers = real(gradient.to_dense() if gradient.is_sparse else gradient)
        if numbers.stride() != self._strides[number]:
            other = torch.empty_strided(
                numbers.shape, self._strides[number], dtype=numbers.dtype, device=numbers.device
            )
            numbers = other.copy_(numbers)
        return numbers.as_strided((numbers.numel(),), (1,))

    def note_norms(self, numbers: Sequence[int], norms: Sequence[Tensor], limits: Tensor) -> None:
        """Note the norms of gradients of these parameters, which should be below the limits."""
        noted = torch.zeros_like(self.norms)
        given = torch.zeros_like(self.counts[0])
        noted[numbers] = torch.stack([norm.double() for norm in norms])
        given[numbers] = 1
        is_finite = noted.isfinite()
        self.counts += torch.stack([given, ~is_finite, is_finite & (noted >= limits)])
        self.norms = torch.maximum(self.norms, noted.where(is_finite, 0.0))

    def add(self, number: int, gradient: Tensor, scale: float) -> None:
        """Add a gradient times `scale`."""
        for part, piece in _pieces(self._parts[number], gradient):
            scaled = piece.to(_dtype(piece)) * scale
            if self._has[number]:
                part.add_(scaled.long())
            else:
                part.copy_(scaled)
        self._has[number] = True

    def clear_missing(self) -> None:
        """Set the sums without a gradient to zero."""
        for part, is_here in zip(self._parts, self._has, strict=True):
            if not is_here:
                part.zero_()

    def receive(self, sums: Sequence[Tensor], scales: Sequence[float]) -> list[float]:
        """Turn the sums of all ranks, in pieces, into the gradients, and return their norms."""
        for mine, total in zip(torch.split(self.sums, _PIECE), sums, strict=True):
            if total.data_ptr() != mine.data_ptr():
                mine.copy_(total)
        of_pieces = list[Tensor]()
        counts = list[int]()
        for result, part, scale in zip(self.results, self._parts, scales, strict=True):
            before = len(of_pieces)
            for target, piece in _pieces(result, part):
                torch.mul(piece.to(_dtype(target)), 1.0 / scale, out=target)
                of_pieces.append(torch.linalg.vector_norm(target).double())
            counts.append(len(of_pieces) - before)
        norms = iter(torch.stack(of_pieces).tolist() if of_pieces else [])
        return [math.hypot(*islice(norms, count)) for count in counts]

    def gradient_of(self, number: int) -> Tensor:
        """Return a result in the shape of its parameter."""
        gradient = self.results[number].as_strided(self._shapes[number], self._strides[number])
        is_complex = self.parameters[number].is_complex()
        return torch.view_as_complex(gradient) if is_complex else gradient


def _pieces(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return pieces of two flat tensors, on CPUs small ones."""
    size = _ON_CPU if one.device.type == "cpu" else max(1, len(one))
    return zip(torch.split(one, size), torch.split(other, size), strict=True)


def _dtype(numbers: Tensor) -> torch.dtype:
    """Return the type in which these numbers are scaled: half precision lacks the range."""
    return torch.promote_types(numbers.dtype, torch.float32)

"""How newcomers are given the state while the others train: a part of it beside each step.

A newcomer takes part in the steps without samples. It has the sums of all gradients, as every rank has, so it makes
each update to what it has already; and an element of a weight is updated from its own gradient, its own numbers in the
optimizer and its own place in the moving average alone. So these travel together, and once they are there they stay
exact. What the newcomer makes of the rest until then means nothing, and nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from hvd_train.world.world import World, nothing_to_wait_for, unwatched

Unit = tuple[Tensor, ...]
"""What belongs to one parameter: it, the optimizer's numbers for it, its average; flat tensors of as many elements."""

AT_ONCE_BYTES = 32 * 2**20
"""What is given while all wait, as it takes no longer than another meeting: 0.3 s at 1 Gbit/s."""
PART_BYTES = 16 * 2**20
"""What travels beside a step, at least."""
MOST_PARTS = 100
"""So a part is a small share of the gradients: these are a third or a fourth of the state, and travel in each step."""


class Handover:
    """Gives newcomers a part of the state beside each step, on all ranks alike."""

    def __init__(
        self,
        world: World,
        root: int,
        units: Sequence[Unit],
        *,
        keep: bool,
        begin: int = 0,
        sent: Callable[[int], None] = unwatched,
    ) -> None:
        """Rank `root` gives its `units` from element `begin` on; with `keep` this rank has them already.

        `sent` is told the number of further bytes that have arrived everywhere.
        """
        self._world, self._root, self._units, self._keep = world, root, units, keep
        self._sent = sent
        self._num_elements = sum(unit[0].numel() for unit in units)
        self._part_bytes = max(PART_BYTES, num_bytes(units) // MOST_PARTS)
        self.arrived = begin
        """The elements, counted through all units, that every rank has."""

    @property
    def is_under_way(self) -> bool:
        """Whether some ranks lack a part of the state, so that they compute nothing."""
        return self.arrived < self._num_elements

    @property
    def is_done(self) -> bool:
        """Whether there was something to give, and every rank has it now."""
        return bool(self._units) and not self.is_under_way

    def start_part(self) -> Callable[[], None]:
        """Begin to send the next part, and return what waits until it is there; both raise RankLost.

        Until then nobody changes a weight.
        """
        if not self.is_under_way:
            return nothing_to_wait_for
        part, end = next_part(self._units, self.arrived, self._part_bytes)
        wait = self._world.start_broadcast(part, self._root, keep=self._keep)

        def wait_for_part() -> None:
            wait()
            self.arrived = end
            self._sent(num_bytes([part]))

        return wait_for_part


def num_bytes(units: Iterable[Iterable[Tensor]]) -> int:
    """Return how many bytes units have together."""
    return sum(tensor.nbytes for unit in units for tensor in unit)


def next_part(units: Sequence[Unit], begin: int, most_bytes: int) -> tuple[list[Tensor], int]:
    """Return the elements from number `begin` on, of at most `most_bytes` together, and the number of the next one.

    The elements of all `units` are counted through. What belongs to one element stays together; there is at least one.
    """
    part: list[Tensor] = []
    left = most_bytes
    first = 0  # the number of the unit's first element
    for unit in units:
        after = first + unit[0].numel()
        if first <= begin < after:
            of_one = sum(tensor.element_size() for tensor in unit)
            count = min(after - begin, max(left // of_one, 0 if part else 1))
            if count == 0:
                break
            part += [tensor[begin - first : begin - first + count] for tensor in unit]
            begin, left = begin + count, left - count * of_one
        first = after
    return part, begin


def nothing_to_hand_over(world: World) -> Handover:
    """Return the handover of a world in which all ranks have the state."""
    return Handover(world, 0, (), keep=True)

"""Synchronize the training state: send the state of one rank to all others."""

import time

import torch
from torch import Tensor

from hvd_train.console import say
from hvd_train.errors import ReplicasDiffer, counted, first_few
from hvd_train.network.digest import tensors_in
from hvd_train.state import TrainState, digest_of_snapshot, map_tensors
from hvd_train.world.wire import has_no_gaps
from hvd_train.world.world import World, unwatched

_QUIET_S = 3.0  # a shorter transfer is not worth a line
_EVERY_S = 10.0


def synchronize(state: TrainState, world: World, root: int) -> None:
    """Send the state of rank `root` to every other rank, which loads it.

    A rank receives the state into host memory and loads it after all ranks have compared digests. So after an error
    each rank still has its own state. Raises: RankLost: if another rank is lost; ReplicasDiffer: if a rank received
    something else than the root sent; UsageError: if the state belongs to another model or optimizer.
    """
    is_root = world.place.rank == root
    snapshot = map_tensors(state.live(), _without_gaps) if is_root else {}
    outline = map_tensors(snapshot, lambda tensor: torch.empty_like(tensor, device="meta"))
    outline = world.broadcast(outline, root)
    if not is_root:
        snapshot = map_tensors(outline, lambda tensor: torch.empty_like(tensor, device="cpu"))
    tensors = [tensor for _, tensor in tensors_in(snapshot)]
    sent = _Notice(sum(tensor.nbytes for tensor in tensors), world.place.size - 1) if is_root else unwatched
    world.broadcast_tensors(tensors, root, sent)
    digests = world.gather(digest_of_snapshot(snapshot))
    if damaged := [rank for rank, digest in enumerate(digests) if digest != digests[root]]:
        raise ReplicasDiffer(f"the state of rank {root} arrived damaged on ranks {first_few(damaged)}")
    if not is_root:
        state.load(snapshot)


def _without_gaps(tensor: Tensor) -> Tensor:
    return tensor.detach() if has_no_gaps(tensor) else tensor.detach().contiguous()


class _Notice:
    """Shows the progress of a long transfer."""

    def __init__(self, num_bytes: int, num_ranks: int) -> None:
        self._num_bytes, self._sent = num_bytes, 0
        self._ranks = counted(num_ranks, "rank")
        self._begun = time.monotonic()
        self._next = self._begun + _QUIET_S

    def __call__(self, num_bytes: int) -> None:
        self._sent += num_bytes
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_S
            unit, name, digits = (1e9, "GB", 1) if self._num_bytes >= 1e9 else (1e6, "MB", 0)
            sent, whole = (f"{count / unit:.{digits}f}" for count in (self._sent, self._num_bytes))
            say(f"sending the state to {self._ranks}: {sent} of {whole} {name} after {now - self._begun:.0f} s")

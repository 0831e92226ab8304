"""The states of all ranks: one sends its own to the others, and all compare theirs."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import torch
from torch import Tensor

from hvd_train.console import say
from hvd_train.data.plain import text_of
from hvd_train.data.trees import map_tensors, tensors_in
from hvd_train.errors import RankDiffers, ReplicasDiffer, UsageError, counted, first_few
from hvd_train.network.digest import digest_of
from hvd_train.state import TENSORS, Snapshot, TrainState, digest_of_snapshot, values_of
from hvd_train.world.wire import has_no_gaps
from hvd_train.world.world import World

_QUIET_S = 3.0  # a shorter transfer is not worth a line


def send_state(
    state: TrainState, world: World, root: int, *, behind: bool = False
) -> Snapshot | None:
    """Send the state of rank `root` to every other rank, which loads and returns it.

    A rank that is `behind` keeps its place.

    A rank receives the state into host memory and loads it after all ranks have compared digests.
    So after an error each rank still has its own state. Raises: RankLost: if another rank is lost;
    ReplicasDiffer: if a rank received something else than the root sent; UsageError: if the state
    belongs to another model or optimizer.
    """
    is_root = world.place.rank == root
    snapshot = map_tensors(state.live(), _without_gaps) if is_root else {}
    outline = map_tensors(snapshot, lambda tensor: torch.empty_like(tensor, device="meta"))
    outline = world.broadcast(outline, root)
    if not is_root:
        snapshot = map_tensors(outline, _on_host)
    tensors = [tensor for _, tensor in tensors_in(snapshot)]
    size, ranks = sum(tensor.nbytes for tensor in tensors), counted(world.place.size - 1, "rank")
    notice = threading.Timer(
        _QUIET_S, say, [f"sending the state, {size / 1e6:,.0f} MB, to {ranks}"]
    )
    if is_root:
        notice.start()
    try:
        world.broadcast_tensors(tensors, root)
    finally:
        notice.cancel()
    digests = world.gather(digest_of_snapshot(snapshot))
    if damaged := [rank for rank, digest in enumerate(digests) if digest != digests[root]]:
        raise ReplicasDiffer(
            f"the state of rank {root} arrived damaged on ranks {first_few(damaged)}"
        )
    if is_root:
        return None
    state.load(snapshot, behind=behind)
    return snapshot


def _on_host(outline: Tensor) -> Tensor:
    """Return memory for a tensor without gaps."""
    # `empty_like` of another device would make torch import sympy
    return torch.empty_strided(outline.shape, outline.stride(), dtype=outline.dtype)


def _without_gaps(tensor: Tensor) -> Tensor:
    return tensor.detach() if has_no_gaps(tensor) else tensor.detach().contiguous()


def confirm_equal(state: TrainState, world: World, what: str = "its start") -> str:
    """Compare the states of all ranks bit for bit, and return their digest.

    Raises: ReplicasDiffer, which is RankDiffers on a rank that differs from most ranks; UsageError:
    if other ranks do something else than `what`; RankLost.
    """
    digests = world.gather(state.digest(), what)
    [(usual, count), *others] = Counter(digests).most_common()
    if not others:
        return usual
    is_known = 2 * count > len(digests)  # which ranks are wrong
    odd = [str(rank) for rank, digest in enumerate(digests) if digest != usual]
    whose = f"rank {first_few(odd)}" if is_known else "all ranks"
    names = first_few(different_tensors(state, world), 3)
    text = (
        f"the weights of {whose} differ from the others at step {state.progress.step} ({names}): "
        "a machine computes wrongly, or code changes weights on some ranks alone; the same command "
        "resumes from the last commit"
    )
    is_odd = is_known and digests[world.place.rank] != usual
    raise RankDiffers(text) if is_odd else ReplicasDiffer(text)


def different_tensors(state: TrainState, world: World) -> list[str]:
    """Return the names of the tensors in which the ranks' states differ. Raises RankLost."""
    live = state.live()
    tensors = tensors_in({name: live[name] for name in TENSORS})
    of_ranks = world.gather({name: digest_of("", [(name, tensor)]) for name, tensor in tensors})
    names = dict.fromkeys(name for digests in of_ranks for name in digests)
    found = [name[1:] for name in names if len({digests.get(name) for digests in of_ranks}) > 1]
    return found or ["no tensor, but what is counted"]


def compare_programs(state: TrainState, own: SimpleNamespace, world: World) -> None:
    """Compare what ranks hold, with these registered values, and where their programs are.

    Raises: UsageError: if the programs are at different places; ReplicasDiffer: if what ranks hold
    differs; RankLost.
    """
    of_code = {f"register({name}=...)": each for name, each in values_of(own).items()}
    of_code["settings of the optimizer"] = state.settings()
    digests_of_own = {
        name: digest_of(text_of(each), tensors_in(each)) for name, each in of_code.items()
    }
    mine = state.history.waits, state.digest(), digests_of_own
    labels, digests, of_own = zip(*world.gather(mine, "its next update or evaluation"), strict=True)
    if len(set(labels)) > 1:
        raise UsageError(
            f"the programs of the ranks are at different places ({labels}): register what decides"
        )
    if odd := [name for each in of_own for name in each if each[name] != of_own[0].get(name)]:
        cause = (
            "a module that runs in the steps, such as a momentum encoder, is one of the "
            "session's models"
        )
        if state.progress.step == 0:
            cause = "seed torch before you make a model that is copied, or copy it in the session"
        raise ReplicasDiffer(
            f"{first_few([*dict.fromkeys(odd)])} differ between ranks: code that changes them "
            f"must do the same on all ranks; {cause}"
        )
    if len(set(digests)) > 1:
        names = first_few(different_tensors(state, world), 3)
        raise ReplicasDiffer(
            f"ranks hold different weights ({names}): the loop must do the same on all ranks"
        )

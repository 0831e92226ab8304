"""How the ranks of a host come to share weights: all of them, or none."""

from __future__ import annotations

from dataclasses import astuple

from torch.optim import Optimizer

from hvd_train.console import say
from hvd_train.world.host_memory import Address, HostMemory, host_identity
from hvd_train.world.shared_weights import Plan, SharedWeights, can_be_shared, give_numbers
from hvd_train.world.step_in_c import Build, rounding_of
from hvd_train.world.world import World

_WORTHWHILE_BYTES = 4 << 20  # of weights: for fewer it takes longer to wait for one another than to copy


def share(world: World, optimizer: Optimizer, build: Build, *, small: bool) -> SharedWeights | None:
    """Move the weights and the state of an optimizer into memory that all ranks of `world`, one host, share.

    All have equal ones. `build` makes an optimizer of the same kind; `small` has it done however few numbers there are.
    Returns None where they keep their own; rank 0 tells the user why, unless it makes no difference. Raises RankLost.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    worthwhile = small or sum(parameter.nbytes for parameter in parameters) >= _WORTHWHILE_BYTES
    if not worthwhile or any(parameter.device.type != "cpu" for parameter in parameters):
        return None
    give_numbers(optimizer, build)
    rounding = rounding_of(optimizer, build)
    mine = host_identity(), rounding and astuple(rounding)
    of_ranks = world.gather(mine if can_be_shared(optimizer) else None)
    able = [of_rank for of_rank in of_ranks if of_rank is not None]
    if len(able) < len(of_ranks) or len({identity for identity, _ in able}) > 1:
        return None
    if len({other for _, other in able}) > 1:  # not all have the part in C, and one thread
        rounding = None
    place, plan = world.place, Plan(optimizer, world.place.size)
    memory, address, problem = _made(plan.num_bytes) if place.rank == 0 else (None, None, "")
    address = world.broadcast(address, 0)
    if address is not None and memory is None:
        memory, problem = _opened(address, plan.num_bytes)
    problems = [problem for problem in world.gather(problem) if problem]
    if problems or memory is None:
        if place.rank == 0:
            say(f"each rank keeps weights of its own, since memory cannot be shared: {problems[0]}")
        return None
    shared = SharedWeights(memory, plan, place.rank, optimizer, build, rounding)
    shared.claim()
    shared.copy_in()
    world.gather(None)  # all have copied what is theirs
    shared.move_in()
    return shared


def _made(num_bytes: int) -> tuple[HostMemory | None, Address | None, str]:
    """Return new memory and its address, or why there is none."""
    try:
        return *HostMemory.made(num_bytes), ""
    except OSError as error:
        return None, None, str(error)


def _opened(address: Address, num_bytes: int) -> tuple[HostMemory | None, str]:
    """Return the memory that rank 0 has made, or why it cannot be had."""
    try:
        return HostMemory.opened(address, num_bytes), ""
    except OSError as error:
        return None, str(error)

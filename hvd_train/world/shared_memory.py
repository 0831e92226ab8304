"""Memory that all ranks see, if they are on one host."""

import contextlib
import os

import torch
from torch import Tensor

from hvd_train.world.world import World


def memory_of_ranks(world: World, num_bytes: int) -> list[Tensor]:
    """Return memory of each rank, [num_bytes] uint8, which begins as zeros; an empty list if a rank cannot see it all.

    It has no name in a file system, and the kernel frees it with the last tensor of all ranks. Waits for all ranks.
    """
    of_ranks = []
    with contextlib.ExitStack() as files:
        number = -1
        with contextlib.suppress(OSError):
            file = os.memfd_create("hvd_train")
            files.callback(os.close, file)
            os.posix_fallocate(file, 0, num_bytes)  # if memory is limited, this fails, and not a later write
            number = file
        for process, its_number in world.gather((os.getpid(), number)):
            with contextlib.suppress(RuntimeError):
                path = f"/proc/{process}/fd/{its_number}"
                of_ranks.append(torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8))
        complete = all(world.gather(len(of_ranks) == world.place.size))
    return of_ranks if complete else []

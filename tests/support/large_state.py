"""Send a state of distinct numbers from the last rank to rank 0: `python -m tests.support.large_state GIB`."""

import resource
import sys

import torch
from torch import nn

from hvd_train.progress.order import BatchLayout
from hvd_train.state import Progress, TrainState, confirm_equal
from hvd_train.transfer import synchronize
from hvd_train.world.horovod_world import HorovodWorld


def main(gib: float) -> None:
    """Send the state to rank 0; each rank prints its state and its peak memory."""
    world = HorovodWorld()
    root = world.place.size - 1
    count = int(gib * 2**30) // 4
    model = nn.Linear(2, 1)
    fill = torch.arange if world.place.rank == root else torch.zeros
    model.register_buffer("large", fill(count, dtype=torch.int32))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
    state = TrainState(model, optimizer, scaler, BatchLayout(1, 1))
    if world.place.rank == root:
        state.progress = Progress(step=7)
    synchronize(state, world, root)
    confirm_equal(state, world)
    large = model.get_buffer("large")
    samples = [int(large[place]) == place for place in (0, 2**29 + 1, min(2**30 + 1, count - 2), count - 1)]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / large.nbytes
    print(f"rank {world.place.rank}: step {state.progress.step}, {all(samples)}, memory {most:.2f} times", flush=True)
    world.close()


if __name__ == "__main__":
    main(float(sys.argv[1]))

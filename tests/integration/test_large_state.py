"""A state with more bytes than Horovod's counters hold; as a program: send it from the last rank to rank 0."""

import re
import resource
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hvd_train.progress.order import BatchLayout
from hvd_train.state import Progress, TrainState, confirm_equal
from hvd_train.transfer import synchronize
from tests.support.launching import PROJECT, launch_line, output_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_a_state_of_gigabytes_arrives_whole(tmp_path: Path, launcher: str) -> None:
    """The state has over 2**32 bytes; at most one more copy is in memory."""
    line = launch_line(launcher, 2, sys.executable, "-m", "tests.integration.test_large_state", "4.2")
    output = output_of(line, tmp_path, limit_s=850, variables={"PYTHONPATH": str(PROJECT)})
    found = sorted(re.findall(r"rank (\d): step (\d+), (\w+), memory ([\d.]+) times", output))
    assert [words[:3] for words in found] == [("0", "7", "True"), ("1", "7", "True")]
    assert all(float(memory) < 2.5 for *_, memory in found), output


def main(gib: float) -> None:
    """Send a state of distinct numbers to rank 0; each rank prints its state and its peak memory."""
    from hvd_train.world.horovod_world import HorovodWorld

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

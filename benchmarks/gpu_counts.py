"""Count what a training step asks of a GPU, on the stand-in for CUDA and NCCL: no GPU is needed.

    python -m benchmarks.gpu_counts          ResNet-50 in fp16 on two ranks over NCCL; about a
                                             minute

For each phase of a step: operators of torch; kernels and copies, which are Horovod's but for the
copies of the input and of the result; and waits of the host until the GPU has done all of a stream
or up to an event. Horovod sends gradients from a thread of its own, during the backward pass and
the reduction.
"""

import ctypes
import json
import operator
import os
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.turns import LAUNCHERS, ROOT
from hvd_train.bench import record, throughput
from hvd_train.progress.clock import Split
from hvd_train.recipes import RECIPES
from tests.fake_gpu import build
from tests.fake_gpu.launch import OnGpu
from tests.support.launching import output_of

KINDS = ("operators", "kernels", "copies", "waits")
Counts = dict[str, dict[str, float]]


def counted(folder: Path) -> Counts:
    """Return the counts of a step on rank 0, by phase and by kind."""
    command = [*LAUNCHERS["gloo"], sys.executable, "-m", "benchmarks.gpu_counts"]
    variables = OnGpu(build.built(), folder).variables()
    output_of(command, folder, variables=variables)
    counts: Counts = json.loads((folder / "counts.json").read_text())
    return counts


def rank() -> None:
    """Take steps on the stand-in, and write their counts on rank 0."""
    from hvd_train.world.horovod_world import HorovodWorld

    library = ctypes.CDLL(None)  # with the stand-in, which was preloaded

    def stamp() -> np.ndarray:
        library.fake_gpu_counts(numbers := (ctypes.c_long * len(KINDS))())
        return np.array(numbers)

    throughput.split_on = lambda _: Split(stamp, operator.sub)
    config = RECIPES["imagenet-resnet50"]().replace(device="cuda", image_size=32, batch_size=4)
    world = HorovodWorld()
    with closing(
        throughput.Stepper(throughput.without_files(config, own_data=False), world)
    ) as stepper:
        stepper.take(3)
        _, counts = stepper.split_of(2)
    if world.place.rank == 0:
        named = {
            phase: dict(zip(KINDS, map(float, of_phase), strict=True))
            for phase, of_phase in counts.items()
        }
        Path("counts.json").write_text(json.dumps(named))
    world.close()
    os._exit(0)  # the stand-in is gone when Horovod frees its buffers at the end of a process


def main() -> None:
    """Print the table."""
    sys.path.append(str(ROOT / "packaging"))  # which the stand-in is built with
    with tempfile.TemporaryDirectory(prefix="gpu-counts-") as folder:
        counts = counted(Path(folder))
    total = {kind: sum(of_phase[kind] for of_phase in counts.values()) for kind in KINDS}
    rows = [
        (phase, *(f"{of_phase[kind]:.0f}" for kind in KINDS))
        for phase, of_phase in {**counts, "a step": total}.items()
    ]
    print(record.table([("phase", *KINDS), *rows]))


if __name__ == "__main__":
    if "FAKE_GPU_REPORT" in os.environ:
        rank()
    else:
        main()

"""Count what a training step asks of a GPU, on the stand-in for CUDA and NCCL: no GPU is needed.

    python -m benchmarks.gpu_counts          ResNet-50 on one rank and on two over NCCL, in fp32,
                                             fp16 and bf16; some minutes

For a step:

- operators of torch, the model's included;
- launches by our own code, and the MB that they read and write: the input, buffers, buckets, the
  optimizer;
- kernels and copies, which are Horovod's but for the copies of the input and of the result;
- waits of the host until the GPU has done all of a stream or up to an event.

Horovod sends gradients from a thread of its own, during the backward pass and the reduction.
"""

import ctypes
import json
import operator
import os
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from types import FrameType

import numpy as np
import torch

import hvd_train
from benchmarks.turns import LAUNCHERS, ROOT
from hvd_train.bench import throughput
from hvd_train.progress.clock import Split
from hvd_train.recipes import RECIPES
from hvd_train.world.world import LocalWorld, World
from tests.fake_gpu import build
from tests.fake_gpu.launch import OnGpu
from tests.support.launching import output_of

KINDS = ("operators", "kernels", "copies", "waits", "own launches", "own MB")
PRECISIONS = ("fp32", "fp16", "bf16")
_BATCH = 4
_OURS = str(Path(hvd_train.__file__).parent)
# what these call belongs to the model
_OF_MODELS = (f"{_OURS}/tasks/", f"{Path(torch.nn.__file__).parent}/modules/")
_BETWEEN = (str(Path(torch.__file__).parent), str(ROOT / "tests"), __file__)


def counted(folder: Path, ranks: int) -> dict[str, dict[str, float]]:
    """Return for each precision the counts of a step on rank 0, by kind."""
    launcher = LAUNCHERS["gloo"] if ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "benchmarks.gpu_counts"]
    output_of(command, folder, variables=OnGpu(build.built(), folder).variables())
    return json.loads((folder / "counts.json").read_text())


def _is_ours(frame: FrameType | None) -> bool:
    """Return whether our code called torch; a backward pass has no caller."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OF_MODELS):
            return False
        if not file.startswith(_BETWEEN):
            return file.startswith(_OURS)
        frame = frame.f_back
    return False


def rank() -> None:
    """Take steps on the stand-in, and write their counts on rank 0."""
    from hvd_train.world.horovod_world import HorovodWorld
    from tests.fake_gpu.operators import WATCHERS

    library = ctypes.CDLL(None)  # with the stand-in, which was preloaded
    own = np.zeros(2)  # launches of our code, and the MB that they read and write

    def watch(launches: int, num_bytes: int) -> None:
        if _is_ours(sys._getframe(1)):
            own[:] += launches, num_bytes / 1e6

    def stamp() -> np.ndarray:
        library.fake_gpu_counts(numbers := (ctypes.c_long * 4)())
        return np.array([*numbers, *own])

    WATCHERS.append(watch)
    throughput.split_on = lambda _: Split(stamp, operator.sub)
    world = HorovodWorld() if "HOROVOD_RANK" in os.environ else LocalWorld()
    counts = {precision: _of_steps(precision, world) for precision in PRECISIONS}
    if world.place.rank == 0:
        Path("counts.json").write_text(json.dumps(counts))
    world.close()
    os._exit(0)  # the stand-in is gone when Horovod frees its buffers at the end of a process


def _of_steps(precision: str, world: World) -> dict[str, float]:
    config = RECIPES["imagenet-resnet50"]().replace(
        device="cuda", image_size=32, batch_size=_BATCH, precision=precision
    )
    with closing(
        throughput.Stepper(throughput.without_files(config, own_data=False), world)
    ) as stepper:
        stepper.take(3)
        _, counts = stepper.split_of(2)
    world.unwrap()
    return dict(zip(KINDS, sum(counts.values()).tolist(), strict=True))


def main() -> None:
    """Print the counts."""
    sys.path.append(str(ROOT / "packaging"))  # which the stand-in is built with
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory(prefix="gpu-counts-") as folder:
            for precision, counts in counted(Path(folder), ranks).items():
                print(f"{precision}, {ranks} ranks: {counts}", flush=True)


if __name__ == "__main__":
    if "FAKE_GPU_REPORT" in os.environ:
        rank()
    else:
        main()

"""The programs that the doctor starts: `trial.py probe`, and `trial.py cpu` or
`trial.py cuda` on each rank.

They run by their path, so that the current folder, which may hold an unpacked Horovod, is not on
Python's path.
"""

import json
import os
import signal
import sys
import warnings
from typing import Any

ANSWER = "hvd-train doctor: "
LIMIT_S = 90.0  # a program ends itself after this, even if the doctor was killed
_MEGABYTE = 262_144  # numbers: so many that the transport is used


def answer(**facts: Any) -> None:
    """Print facts by one write, since launchers mix output. The last answer of a program counts."""
    sys.stdout.flush()
    os.write(1, f"\n{ANSWER}{json.dumps(facts)}\n".encode())


def probe() -> None:
    """Answer what torch, torchvision and Horovod have, and before each import,
    which may crash, its name.
    """
    answer(importing="torch")
    import torch

    facts: dict[str, Any] = {"version": str(torch.__version__), "cuda": torch.version.cuda}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facts["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts["gpu_warning"] = str(caught[0].message).splitlines()[0] if caught else ""
    answer(**facts, importing="torchvision")
    import torchvision

    facts["torchvision"] = torchvision.__version__
    answer(**facts, importing="horovod")
    import horovod.torch as hvd

    answer(
        **facts, gloo=bool(hvd.gloo_built()), mpi=bool(hvd.mpi_built()), nccl=bool(hvd.nccl_built())
    )


def allreduce(device: str) -> None:
    """Sum over all ranks, and let rank 0 answer the sums, and which ranks compute wrongly."""
    import horovod.torch as hvd
    import torch

    from hvd_train.world import known_answer

    hvd.init()
    if device == "cuda":
        torch.cuda.set_device(hvd.local_rank())
    mine = torch.full((_MEGABYTE,), hvd.rank() + 1.0, device=device)
    total = hvd.allreduce(mine, op=hvd.Sum, name="doctor")
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append(f"cuda:{hvd.local_rank() % torch.cuda.device_count()}")
    wrong = sum(not known_answer.is_right(torch.device(name)) for name in devices)
    of_ranks = hvd.allgather(torch.tensor([wrong]), name="doctor.results").tolist()
    if hvd.rank() == 0:
        wrong_ranks = [rank for rank, wrong in enumerate(of_ranks) if wrong]
        answer(size=hvd.size(), sums=total.unique().tolist()[:4], wrong=wrong_ranks)
    hvd.shutdown()


if __name__ == "__main__":
    sys.path = [folder for folder in sys.path if folder]
    signal.alarm(int(LIMIT_S))
    if sys.argv[1] == "probe":
        probe()
    else:
        allreduce(sys.argv[1])

"""The device of a rank: threads, memory, clocks, number formats and loss scale."""

import ctypes
import os
import resource
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hvd_train.config import Config
from hvd_train.data.random_numbers import seed_on_cpu
from hvd_train.errors import UsageError
from hvd_train.launch import workers
from hvd_train.progress.clock import Split
from hvd_train.world.world import Place, World

_SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL 2.30 lets ranks share a GPU if this is 1
_M_TRIM_THRESHOLD = -1  # from malloc.h
_M_MMAP_MAX = -4
_THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_MUCH_SLOWER = 10.0  # times as long as in fp32
# by kind: the sizes of inputs and weights
_SMALL_LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "convolution": ((2, 64, 16, 16), (64, 64, 3, 3)),
    "linear layer": ((256, 64), (64, 64)),
}


def choose_device(config: Config, place: Place) -> torch.device:
    """Return this rank's GPU, or the CPU, and prepare torch for it.

    Raises UsageError if it cannot use the GPU.
    """
    count = 0 if config.run.device == "cpu" else _count_gpus()
    if config.run.device == "cuda" and count == 0:
        raise UsageError(
            "--device cuda: torch sees no GPU here; type --device cpu, or "
            "`hvd-train doctor` for why"
        )
    # CPUs always are, and refuse some operations then
    deterministic = config.precision.deterministic or (config.precision.is_exact and count > 0)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    if count == 0:
        if threads := config.precision.threads or (1 if config.precision.is_exact else None):
            torch.set_num_threads(threads)
        elif not any(name in os.environ for name in _THREADS):  # torch has read them
            torch.set_num_threads(num_cores(place))
        _keep_freed_memory()
        return torch.device("cpu")
    # Slurm's --gpus-per-task shows each rank its own GPU alone by CUDA_VISIBLE_DEVICES;
    # `check_own_gpus` compares them.
    own = count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ and not workers.elastic(os.environ)
    if place.local_size > count and not own and os.environ.get(_SHARED) != "1":
        raise UsageError(
            f"{place.local_size} ranks on this host but {count} GPUs: start one rank per GPU"
        )
    device = torch.device("cuda", place.local_rank % count)
    torch.cuda.set_device(device)
    # it may choose other algorithms each run
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        # else torch refuses to use cuBLAS
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return device


def _count_gpus() -> int:
    """Return the number of GPUs.

    Raises UsageError if torch cannot use them, such as with an old driver.
    """
    with warnings.catch_warnings(record=True) as caught:  # without a driver, torch does not warn
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0 and caught:
        why = str(caught[0].message).partition(". ")[0]
        raise UsageError(f"{why}: type `hvd-train doctor`, or --device cpu to train without GPUs")
    return count


def check_own_gpus(world: World, device: torch.device) -> None:
    """Raise UsageError on all ranks of a static job if two have the same
    GPU, unless NCCL shares GPUs.
    """
    if device.type != "cuda" or os.environ.get(_SHARED) == "1" or workers.elastic(os.environ):
        return
    gpu = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    ranks: dict[tuple[str, str], int] = {}
    for rank, other in enumerate(world.gather(gpu)):
        if other in ranks:
            raise UsageError(
                f"ranks {ranks[other]} and {rank} have the same GPU of {other[0]}: "
                "start one rank per GPU"
            )
        ranks[other] = rank


def num_cores(place: Place) -> int:
    """Return this rank's share of its host's cores, at least 1."""
    cores = len(os.sched_getaffinity(0))
    # by Slurm, to the cores of this task, which torchrun may share among its ranks
    bound = cores <= int(os.environ.get("SLURM_CPUS_PER_TASK", "0"))
    bound = bound and "LOCAL_WORLD_SIZE" not in os.environ
    return cores if bound else max(1, cores // place.local_size)


def _keep_freed_memory() -> None:
    """Make malloc keep freed memory (mallopt(3)), unless the environment configures malloc.

    Else the kernel clears large blocks in each step, which costs from a fifth (ResNet-18) to half
    of its arithmetic.
    """
    variables = (
        "GLIBC_TUNABLES",
        "MALLOC_MMAP_MAX_",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
    )
    if not any(name in os.environ for name in variables):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def gpu_name(device: torch.device) -> str | None:
    """Return the driver's name of a GPU, or None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory that this process has used: of its GPU, or, without loader
    processes, of the machine.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def gpu_load(device: torch.device) -> dict[str, float]:
    """Return used memory, utilization (0 to 1) and power of a whole GPU,
    as far as the driver tells.

    Without nvidia-ml-py, and for a CPU, it is empty.
    """
    read: dict[str, Callable[[], float]] = {
        "memory_gib": lambda: torch.cuda.device_memory_used(device) / 2**30,
        "utilization": lambda: torch.cuda.utilization(device) / 100,
        "power_w": lambda: torch.cuda.power_draw(device) / 1000,
    }
    found = {}
    for name, value in read.items() if device.type == "cuda" else ():
        with suppress(Exception):  # NVML has many, and none of them may end a training
            found[name] = round(value(), 3)
    return found


def split_on(device: torch.device) -> Split:
    """Return a split that times the phases of a step on `device`; on a GPU by CUDA events."""
    if device.type != "cuda":
        return Split()

    def stamp() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(end: torch.cuda.Event, start: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    return Split(stamp, seconds)


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seed(device: torch.device, number: int) -> None:
    """Seed the random numbers of torch on the CPU and `device`, of numpy and of `random`."""
    seed_on_cpu(number)  # torch.manual_seed seeds all kinds of device, which takes 160 us
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def arithmetic(config: Config, device: torch.device) -> str:
    """Return the arithmetic of the passes: fp32, fp16 or bf16."""
    choice = config.precision.precision
    return ("fp16" if device.type == "cuda" else "fp32") if choice == "auto" else choice


def notes_on_arithmetic(config: Config, device: torch.device, model: nn.Module) -> list[str]:
    """Return lines for the user about the arithmetic on a CPU."""
    choice = config.precision.precision
    if device.type != "cpu" or choice == "fp32":
        return []
    if choice == "auto":
        return ["the arithmetic is fp32 on CPUs, not fp16 as on GPUs; --precision fp16 asks for it"]
    has_convolution = any(isinstance(module, _ConvNd) for module in model.modules())
    layer = "convolution" if has_convolution else "linear layer"
    times = _times_as_long(_DTYPES[choice], layer)
    if times < _MUCH_SLOWER:
        return []
    return [
        f"--precision {choice}: a {layer} takes {times:.0f} times as long as in fp32 on this CPU: "
        "leave it out"
    ]


def _times_as_long(dtype: torch.dtype, layer: str) -> float:
    """Return how many times as long the passes of a small layer take as in fp32 on this CPU."""
    function = torch.conv2d if layer == "convolution" else nn.functional.linear
    inputs, weights = _SMALL_LAYERS[layer]
    numbers = [torch.ones(size, requires_grad=True) for size in (inputs, weights)]

    def seconds(*, enabled: bool) -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            result = function(*numbers)
        torch.autograd.grad(result.sum(), numbers)
        return time.perf_counter() - start

    usual = min(seconds(enabled=False) for _ in range(5))  # the first ones allocate memory
    return min(seconds(enabled=True) for _ in range(2)) / usual


def autocast(config: Config, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of forward passes: the arithmetic of `--precision`.

    It may be entered many times.
    """
    dtype = _DTYPES.get(arithmetic(config, device))
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def uses_channels_last(config: Config, device: torch.device, *, suits: bool = False) -> bool:
    """Return whether images and weights have torch's memory format `channels_last`.

    `suits`: a CPU computes this model faster with it.
    """
    choice = config.precision.channels_last
    if choice != "auto":
        return choice == "on"
    return arithmetic(config, device) != "fp32" if device.type == "cuda" else suits


def wire_format(config: Config, device: torch.device) -> str:
    """Return the format of gradients on the wire: fp16, bf16 or none.

    `auto` is fp16 on GPUs; casts on a CPU cost more than they save.
    """
    choice = "none" if config.precision.is_exact else config.precision.compression
    return ("fp16" if device.type == "cuda" else "none") if choice == "auto" else choice


class LossScaler(torch.amp.GradScaler):
    """A loss scaler that need not look at the gradients itself."""

    def note(self, broken: Tensor) -> None:
        """Let `update` know whether they have overflowed: `broken`, [] float32, is 1 then."""
        if self.is_enabled():
            self._per_optimizer_states[0]["found_inf_per_device"] = {broken.device: broken}


def loss_scaler(config: Config, device: torch.device) -> LossScaler:
    """Return the loss scaler, disabled without fp16 in arithmetic or wire.

    Horovod's fp16 compression casts without scaling: 7e4 becomes inf and 1e-8 becomes 0. For loss
    scaling see Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740.
    """
    in_passes = arithmetic(config, device) == "fp16"
    scales = in_passes or wire_format(config, device) == "fp16"
    # torch's default, or a lower one that skips no steps at the start
    scale = 65536.0 if in_passes else 1024.0
    scaler = LossScaler(device.type, init_scale=scale, enabled=scales)
    # creates its tensors: a rank may have no micro-batch in the first step
    scaler.scale(torch.ones((), device=device))
    return scaler

"""The device of a rank, what belongs to it (threads, memory, clocks), and the loss scale of its number formats."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from hvd_train.config import Config
from hvd_train.doctor import gpu_code, nvidia
from hvd_train.errors import UsageError
from hvd_train.launch import launcher
from hvd_train.progress.clock import Split
from hvd_train.world import cores
from hvd_train.world.world import Place

# The first loss scales. 65,536 is torch's own default for fp16 arithmetic. Where only the wire is fp16, gradients are
# computed in fp32, and a scale that does not overflow at the start loses no step.
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_FP16_SCALE, _WIRE_SCALE = 65536.0, 1024.0
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


def choose_device(config: Config, place: Place) -> torch.device:
    """Return this rank's device, a GPU of its own or the CPU, and prepare torch and this process for it.

    On a CPU torch gets this rank's share of the cores as threads. Raises UsageError where GPUs are asked for and there
    are none, where there are some that torch cannot use or Horovod is not compiled for, where `--gpu-ids` names one
    that is not there, and where an elastic job has more slots on the host than there are GPUs. Whether ranks have
    GPUs of their own is seen when all have chosen (`check_own_gpus`).
    """
    count = _count_gpus(config)
    if config.run.device == "cuda" and count == 0:
        raise UsageError("--device cuda: torch sees no GPU here; type --device cpu, or `hvd-train doctor` for why")
    if config.data.decode == "gpu" and count == 0:
        raise UsageError(
            "--decode gpu: torch sees no GPU here; type --decode cpu (to evaluate --device cpu), or `hvd-train doctor` "
            "for why"
        )
    if config.precision.deterministic:
        torch.use_deterministic_algorithms(True)
    if count == 0:
        _keep_freed_memory()
        use_cores(torch.device("cpu"), place)
        return torch.device("cpu")
    ids = config.run.gpu_ids or tuple(range(count))
    if missing := [number for number in ids if not 0 <= number < count]:
        raise UsageError(f"--gpu-ids: there is no GPU {missing[0]} on this host; they are 0 to {count - 1}")
    # In other jobs the launcher may have given each rank GPUs of its own, as srun --gpus-per-task does.
    if place.local_size > len(ids) and launcher.elastic(os.environ) and not gpus_may_be_shared():
        raise UsageError(
            f"{place.local_size} ranks on this host but {len(ids)} GPUs: start one rank per GPU, or type --device cpu"
        )
    device = torch.device("cuda", ids[place.local_rank % len(ids)])
    torch.cuda.set_device(device)
    _check_code(device)
    # cuDNN finds the fastest algorithm for each shape by trial, and may choose another one in the next run.
    torch.backends.cudnn.benchmark = not config.precision.deterministic
    if config.precision.deterministic:
        # Without this cuBLAS is not deterministic, and torch refuses to use it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return device


def _count_gpus(config: Config) -> int:
    """Return how many GPUs torch can use. Raises UsageError where it can use none of those that are there."""
    if config.run.device == "cpu":
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that is too old: what follows says more
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0 and torch.version.cuda is not None and (found := nvidia.unusable(torch.version.cuda)):
        raise UsageError(
            f"torch cannot use this host's GPU: {found.why}; {found.todo}, or type --device cpu to train on the CPU"
        )
    return count


def _check_code(device: torch.device) -> None:
    """Raise UsageError where Horovod, by which a launched rank reduces, has no kernels for this GPU."""
    archs = gpu_code.compiled_for() if launcher.launched(os.environ) else None
    if archs is None:
        return
    major, minor = torch.cuda.get_device_capability(device)
    capability = 10 * major + minor
    if not gpu_code.covers(archs, capability):
        raise UsageError(
            f"Horovod is not compiled for {gpu_name(device)} (compute capability {major}.{minor}): type "
            f"{gpu_code.todo(archs, [capability])}"
        )


def gpu_identity(device: torch.device) -> str:
    """Return what no other GPU of any host has, nor another part of a divided one; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def gpus_may_be_shared() -> bool:
    """Return whether NCCL has been told that several ranks may have one GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def check_own_gpus(identities: Sequence[str]) -> None:
    """Raise UsageError unless each rank has a GPU of its own, or all compute on CPUs; `identities` are by rank."""
    on_cpus = [rank for rank, identity in enumerate(identities) if not identity]
    if 0 < len(on_cpus) < len(identities):
        raise UsageError(
            f"rank {on_cpus[0]} sees no GPU, and others do: type --device cpu, or see `hvd-train doctor` on its host"
        )
    for rank, identity in enumerate(identities):
        first = identities.index(identity)
        if identity and first < rank and not gpus_may_be_shared():
            raise UsageError(
                f"ranks {first} and {rank} have the same GPU: start one rank per GPU (or with Slurm let each task have "
                "its own: --gpus-per-task=1), or type --device cpu"
            )


def use_cores(device: torch.device, place: Place) -> None:
    """Have torch compute on a CPU with as many threads as there are cores for the rank at `place`."""
    if device.type == "cpu":
        torch.set_num_threads(num_cores(place))


def num_cores(place: Place) -> int:
    """Return how many cores are for a rank, at least 1; before the ranks have met, as if all may use the same."""
    if place.num_cores is not None:
        return place.num_cores
    own = cores.of_this_process()
    return cores.share(own, [own] * place.local_size)


def _keep_freed_memory() -> None:
    """Have malloc keep freed memory for the tensors of the next step, unless the environment configures malloc.

    glibc returns large freed pieces to the kernel, which clears each page again when it is next touched: that takes a
    fifth of the arithmetic of a ResNet-18's step, half of a VGG-11's. mallopt(3) documents the options; other
    allocators ignore them.
    """
    variables = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and not any(name in os.environ for name in variables):
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Give the kernel what is freed now and will not be needed again, as malloc_trim(3) does where there is one."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def gpu_name(device: torch.device) -> str | None:
    """Return the name of a GPU as its driver gives it, or None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def split_on(device: torch.device) -> Split:
    """Return a split that times the phases of a step on `device`, on a GPU by events in its own queue."""
    if device.type != "cuda":
        return Split()

    def stamp() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(end: torch.cuda.Event, start: torch.cuda.Event) -> float:
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1000

    return Split(stamp, seconds)


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all work that was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seed(device: torch.device, number: int) -> None:
    """Seed torch's default random generators of the CPU and of `device` with `number`.

    torch.manual_seed seeds every kind of device that might exist, which takes 160 microseconds for each micro-batch.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which forward passes have the arithmetic of this precision: fp32, fp16 or bf16."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, dtype=_DTYPES[precision])


def uses_channels_last(config: Config, device: torch.device) -> bool:
    """Return whether images and weights are stored in torch's memory format `channels_last`."""
    choice = config.precision.channels_last
    return device.type == "cuda" and config.precision.precision != "fp32" if choice == "auto" else choice == "on"


def wire_format(config: Config, device: torch.device) -> Literal["none", "fp16", "bf16"]:
    """Return the format in which gradients travel, none for their own.

    With `--compression auto` those on GPUs travel as fp16; on a CPU the casts cost more than they save.
    """
    choice = config.precision.compression
    if choice == "auto":
        return "fp16" if device.type == "cuda" else "none"
    return choice


def wire_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """Return the type of the tensors in which gradients travel, None for their own."""
    return _DTYPES.get(wire_format(config, device))


def loss_scaler(config: Config, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler that keeps gradients in the range of fp16, in the arithmetic or only on the wire.

    It is disabled where neither is fp16. Gradients are cast to fp16 as they are: 7e4 becomes inf and 1e-8 becomes 0. A
    scale that grows until a gradient overflows, and then halves, saves small gradients; an overflow skips the step on
    every rank (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740). bf16 has the exponents of fp32,
    so a gradient in fp32 is neither too large nor too small for a wire of bf16 (but above 3.39e38, which is inf), and a
    scale, a power of two, would change no bit of its significand: there is none for that wire.
    """
    arithmetic = config.precision.precision == "fp16"
    scaler = torch.amp.GradScaler(
        device.type,
        init_scale=_FP16_SCALE if arithmetic else _WIRE_SCALE,
        enabled=arithmetic or wire_format(config, device) == "fp16",
    )
    scaler.scale(torch.ones((), device=device))  # creates its tensors: a rank may have no slot in the first step
    return scaler

"""Where a rank computes, and the loss scale its number formats need."""

from __future__ import annotations

import ctypes
import os

import torch

from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.progress.clock import Split
from hvd_train.world.world import Place

# First loss scales. 65,536 is torch's own for fp16 arithmetic; where only the wire is fp16 the gradients were
# computed in fp32, and a scale that never overflows at the start loses no step.
_FP16_SCALE, _WIRE_SCALE = 65536.0, 1024.0
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


def choose_device(config: Config, place: Place) -> torch.device:
    """The device of this rank: a GPU of its own, or the CPU with this rank's share of the cores.

    Raises UsageError where a GPU is asked for and there is none, or fewer than ranks on this host.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.run.device == "cuda" and count == 0:
        raise UsageError("--device cuda: torch sees no GPU here; type --device cpu, or `hvd-train doctor` for why")
    if config.precision.deterministic:
        torch.use_deterministic_algorithms(True)
    if config.run.device == "cpu" or count == 0:
        torch.set_num_threads(cores(place))
        _keep_freed_memory()
        return torch.device("cpu")
    ids = config.run.gpu_ids or tuple(range(count))
    if missing := [number for number in ids if not 0 <= number < count]:
        raise UsageError(f"--gpu-ids: there is no GPU {missing[0]} on this host; they are 0 to {count - 1}")
    if place.local_size > len(ids):
        raise UsageError(
            f"{place.local_size} ranks on this host but {len(ids)} GPUs: start one rank per GPU, or type --device cpu"
        )
    device = torch.device("cuda", ids[place.local_rank])
    torch.cuda.set_device(device)
    # The fastest algorithm for each shape is found by trial, which is another one from run to run.
    torch.backends.cudnn.benchmark = not config.precision.deterministic
    if config.precision.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not, and torch says so
    return device


def cores(place: Place) -> int:
    """This rank's share of those that its host's ranks may use."""
    return max(1, len(os.sched_getaffinity(0)) // place.local_size)


def _keep_freed_memory() -> None:
    """Have malloc keep what tensors leave behind for those of the next step, where nobody has said otherwise.

    glibc gives large pieces back to the kernel as they are freed, which clears each page anew when it is next touched:
    a fifth of the arithmetic of a ResNet-18's step, half of a VGG-11's (mallopt(3)). Other allocators take no notice.
    """
    said = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and not any(name in os.environ for name in said):
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, 2**31 - 1)


def gpu_name(device: torch.device) -> str | None:
    """As its driver gives it; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def split_on(device: torch.device) -> Split:
    """A time split of what this device does."""
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
    """Wait until the device has done all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seed(device: torch.device, number: int) -> None:
    """Start the random numbers of the CPU and of this device anew.

    torch.manual_seed does so for every kind of device there might be, which takes 160 microseconds of each micro-batch.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def uses_channels_last(config: Config, device: torch.device) -> bool:
    """Whether images lie in memory with their channels innermost."""
    choice = config.precision.channels_last
    return device.type == "cuda" and config.precision.precision != "fp32" if choice == "auto" else choice == "on"


def uses_fp16_wire(config: Config, device: torch.device) -> bool:
    """Whether gradients travel as fp16. On a CPU the casts cost more than they save."""
    choice = config.precision.compression
    return device.type == "cuda" if choice == "auto" else choice == "fp16"


def loss_scaler(config: Config, device: torch.device, *, fp16_wire: bool) -> torch.amp.GradScaler:
    """The loss scale that keeps gradients in the range of fp16, be it in the arithmetic or only on the wire.

    Horovod's fp16 compression casts as it is: 7e4 becomes inf and 1e-8 becomes 0. With a scale that grows
    until something overflows and then halves, small gradients survive and an overflow skips the step on
    every rank (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740).
    """
    arithmetic = config.precision.precision == "fp16"
    scaler = torch.amp.GradScaler(
        device.type, init_scale=_FP16_SCALE if arithmetic else _WIRE_SCALE, enabled=arithmetic or fp16_wire
    )
    scaler.scale(torch.ones((), device=device))  # makes its tensors now: a rank may have no slot in the first step
    return scaler

"""Memory that does not suffice: one line that says for what, how much there is, and what to type."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from hvd_train.errors import OutOfMemory
from hvd_train.network.usage import peak_memory
from hvd_train.progress.order import Cut
from hvd_train.settings.batch import BatchConfig

_GB = 1e9
# Of torch's allocators, of CUDA where memory is not torch's, and of cuDNN and cuBLAS, which raise plain RuntimeErrors.
_SIGNS = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED")


@contextmanager
def enough_for(doing: str, device: torch.device, todo: str) -> Iterator[None]:
    """Raise OutOfMemory where the memory of `device`, or of the host, does not suffice for what the block does.

    What it was doing may be half done then: nothing of it is to be used. `todo` says what to type.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)):
            raise
        raise OutOfMemory(f"out of memory {doing}: {_held(device)}; {todo}") from error


def enough_for_passes(batch: BatchConfig, cut: Cut, device: torch.device) -> AbstractContextManager[None]:
    """Return the block in which a lack of memory for the passes of `cut` is an OutOfMemory that says what to type."""
    return enough_for(f"with {cut.micro_batch} samples in a pass", device, smaller_passes(batch, cut))


def smaller_passes(batch: BatchConfig, cut: Cut) -> str:
    """Return what to type for steps over as many samples in smaller passes than those of `cut`."""
    half = cut.micro_batch // 2
    if half == 0:
        return "type --precision bf16, or take smaller images or another model: a pass has one sample already"
    if batch.global_batch_size is None and cut.micro_batch % 2 == 0:
        flags = f"--batch-size {half} --accumulation-steps {2 * batch.accumulation_steps}"
    else:
        flags = f"--global-batch-size {cut.global_batch} --batch-size {half} --accumulation-steps 1"
    return f"type {flags}: the same steps, in passes of half the size"


def _held(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        peak, size, whose = peak_memory(device)["peak_gpu_memory"], properties.total_memory, properties.name
        return f"torch held {peak / _GB:.2f} GB at its peak, and {whose} has {size / _GB:.2f} GB"
    peak = peak_memory(device)["peak_memory"]
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"this process held {peak / _GB:.2f} GB at its peak, and the host has {size / _GB:.2f} GB"

"""Copies to a GPU on a stream of their own: beside the kernels of a step, not behind them in the same queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hvd_train.data.coded import CodedBatch
from hvd_train.data.gpu_decoder import decoder
from hvd_train.data.trees import Tree, mapped


class Copies:
    """Copies tensors from pinned memory to a GPU ahead of their use.

    They lie in memory of the stream of copies, so a block of `use` is the only place to read them. What it makes of
    them has memory of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, inputs: Tree | CodedBatch, targets: Tree) -> tuple[Tree, Tree]:
        """Begin to copy a batch; what was copied before it must be used and given up, so that memory suffices.

        Images that come as files are decoded. Raises UsageError that names a file.
        """
        with torch.cuda.stream(self._stream):
            if isinstance(inputs, CodedBatch):
                inputs = decoder(self._device).images(inputs)
            else:
                inputs = mapped(self._copy, inputs)
            return inputs, mapped(self._copy, targets)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Let kernels that are launched inside the block read the copies that have begun.

        They wait for the copies, and later copies for them. By `record_stream` torch would only give the memory to no
        other copy before the kernels are done; a host that is ahead of its GPU would take more memory for each copy.
        """
        kernels = torch.cuda.current_stream(self._device)
        kernels.wait_stream(self._stream)
        yield
        self._stream.wait_stream(kernels)

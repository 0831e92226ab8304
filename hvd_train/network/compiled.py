"""Compile the model before other ranks wait for it, for all shapes of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_train.network.buffers import unchanged
from hvd_train.progress.order import BatchLayout


def micro_batch_sizes(layout: BatchLayout, num_samples: int) -> list[int]:
    """Return the numbers of samples that a micro-batch can have in an epoch of `num_samples`, the usual one first."""
    sizes = [
        len(micro) for batch in layout.batches(range(num_samples)).ends for micro in layout.micro_batches(batch).ends
    ]
    return list(dict.fromkeys(sizes))


def any_size(sizes: list[int]) -> list[int]:
    """Return the sizes, two at least: at the second one torch.compile makes a program for any number of samples."""
    return sizes if len(sizes) != 1 else [*sizes, sizes[0] - 1 if sizes[0] > 2 else sizes[0] + 1]


def compile_model(
    model: nn.Module,
    example: Tensor,
    autocast: AbstractContextManager[object],
    *,
    train_sizes: list[int],
    eval_sizes: list[int],
) -> None:
    """Compile the model and pass batches of these sizes through it, made of images of `example`.

    torch.compile works when a model is called, for one kind of input at a time. After the rendezvous all ranks would
    wait for the one that compiles. Training passes include the backward one. Weights, buffers, gradients, modes
    and random numbers stay the same. An evaluation of the moving average, and an epoch in which other parameters are
    frozen, are compiled later.
    """
    model.compile()
    with _unchanged(model, example.device):
        for size in train_sizes:
            with autocast:
                logits = model(_images(example, size))
                loss = F.cross_entropy(logits, torch.zeros(size, dtype=torch.long, device=example.device))
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        model.eval()
        with torch.no_grad(), autocast:
            for size in eval_sizes:
                model(_images(example, size))


def _images(example: Tensor, size: int) -> Tensor:
    """Return `size` images in memory of their own, in the layout of the example."""
    return torch.cat([example] * -(-size // len(example)))[:size].clone()


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    with unchanged(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for module, training in modes:
        module.training = training

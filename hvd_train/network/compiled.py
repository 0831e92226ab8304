"""Compile the model for all shapes of an epoch before the rendezvous."""

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_train.network.buffers import unchanged
from hvd_train.progress.order import BatchLayout


def micro_batch_sizes(layout: BatchLayout, num_samples: int) -> list[int]:
    """Return the sizes of micro-batches in an epoch, the usual one first."""
    batches = layout.batches(range(num_samples)).ends
    return list(dict.fromkeys(len(micro) for batch in batches for micro in layout.micro_batches(batch).ends))


def any_size(sizes: list[int]) -> list[int]:
    """Return at least two sizes: at the second one torch.compile generates code for any batch size."""
    return sizes if len(sizes) != 1 else [*sizes, sizes[0] - 1 if sizes[0] > 2 else sizes[0] + 1]


def compile_model(
    model: nn.Module,
    example: Tensor,
    autocast: AbstractContextManager[object],
    *,
    train_sizes: list[int],
    eval_sizes: list[int],
) -> None:
    """Compile the model with batches of these sizes, made of `example` images.

    torch.compile compiles at the first call with each kind of input; after the rendezvous all ranks would wait for it.
    The moving average, and epochs that freeze other parameters, are compiled later. The state stays the same.
    """
    model.compile()
    modes = [(module, module.training) for module in model.modules()]
    with unchanged(model), torch.random.fork_rng([example.device] if example.is_cuda else []):
        for size in train_sizes:
            with autocast:
                logits = model(_images(example, size))
                loss = F.cross_entropy(logits, torch.zeros(size, dtype=torch.long, device=example.device))
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        model.eval()
        with torch.no_grad(), autocast:
            for size in eval_sizes:
                model(_images(example, size))
    for module, training in modes:
        module.training = training


def _images(example: Tensor, size: int) -> Tensor:
    return torch.cat([example] * -(-size // len(example)))[:size].clone()

"""The model compiled block by block, and in which shapes, so that it is done before anybody waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from hvd_train.progress.order import Cut

_PROGRAMS_OF_A_BLOCK = 16  # at most: kinds of slots in training and evaluation, again where other parameters are frozen


def slot_sizes(cut: Cut, num_samples: int) -> list[int]:
    """Return the numbers of samples that a slot can have in an epoch of `num_samples`, the usual one first."""
    batches = [cut.global_batch] * (num_samples >= cut.global_batch) + [num_samples % cut.global_batch]
    sizes = [size for batch in batches for size in (min(batch, cut.micro_batch), batch % cut.micro_batch)]
    return list(dict.fromkeys(size for size in sizes if size))


def any_size(sizes: list[int]) -> list[int]:
    """Return the sizes, two at least: at the second one torch.compile makes a program for any number of samples."""
    return sizes if len(sizes) != 1 else [*sizes, sizes[0] - 1 if sizes[0] > 2 else sizes[0] + 1]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are compiled each for itself, where gradients are to leave early.

    As one program a model hands over all gradients at the end of the backward pass; a block does when its part is over.
    A block has other modules inside, and parameters. Blocks are the outermost modules whose class occurs more than once
    in the model, such as the layers of a transformer; a chain (`nn.Sequential`) of blocks is none itself. Where nothing
    occurs more than once, they are the innermost modules with others inside. A model without any is one block itself.
    """
    occurrences = Counter(map(type, model.modules()))

    def inside(module: nn.Module) -> list[nn.Module]:
        return [block for part in module.children() for block in within(part)]

    def within(part: nn.Module) -> list[nn.Module]:
        has_forward = type(part).forward is not nn.Module.forward  # a ModuleList has none
        if not has_forward or not list(part.children()) or not list(part.parameters()):
            return inside(part)
        if occurrences[type(part)] > 1 and not isinstance(part, nn.Sequential):
            return [part]
        return inside(part) or [part]

    return list(dict.fromkeys(inside(model))) or [model]


def compile_blocks(blocks: Sequence[nn.Module], *, for_any_size: bool) -> None:
    """Have each block compiled when it is called, for a kind of input at a time.

    `for_any_size` the second number of samples makes a program for all of them. Else each has its own, as otherwise
    blocks of one class would have programs for images of any height and width as well, which are slower.
    """
    import torch._dynamo.config as limits  # slow to import

    # Blocks share programs by class, so the limit counts those of all blocks of a class; beyond it they run uncompiled.
    programs = _PROGRAMS_OF_A_BLOCK * len(blocks)
    # Named as in torch 2.6; later ones know these names, too.
    limits.cache_size_limit = max(limits.cache_size_limit, programs)
    limits.accumulated_cache_size_limit = max(limits.accumulated_cache_size_limit, programs)
    for block in blocks:
        block.compile(dynamic=None if for_any_size else False)

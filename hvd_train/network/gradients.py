"""The norm of all gradients, and their clip."""

import torch
from torch import Tensor

from hvd_train.world.world import Gradients

_PIECE = 1 << 18  # elements


def norm_of(gradients: Gradients, device: torch.device) -> Tensor:
    """Return the 2-norm of all gradients, [] float64."""
    pieces = [piece for tensor in gradients.tensors for piece in _pieces(tensor)]
    norms = torch._foreach_norm(pieces) if pieces else [torch.zeros((), device=device)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float64)
    return norm


def _pieces(gradient: Tensor) -> list[Tensor]:
    # On a CPU torch adds up squares in float32: over the 100 million elements of a layer of VGG-11
    # 1% is lost.
    if gradient.numel() <= _PIECE or gradient.device.type != "cpu":
        return [gradient]
    return [*torch.split(gradient, max(1, _PIECE * len(gradient) // gradient.numel()))]


def multiply(gradients: Gradients, factor: Tensor | None) -> None:
    """Multiply all gradients, unless `factor` is None."""
    if factor is not None and gradients.tensors:
        # The factor of a step that is skipped may be NaN, which would stay in the zeros between the
        # gradients.
        torch._foreach_mul_(gradients.tensors, factor.nan_to_num(0.0))

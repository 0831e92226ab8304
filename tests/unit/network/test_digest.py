"""Hashes of tensors that a GPU computes for a digest."""

import pytest
import torch
from torch import Tensor

from hvd_train.network.digest import hashes_of

TWO_MILLION = 1 << 21


def flipped(tensor: Tensor, byte: int, bit: int) -> Tensor:
    """Return a copy with another bit."""
    changed = tensor.clone()
    changed.reshape(-1).view(torch.uint8)[byte] ^= 1 << bit
    return changed


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.complex64],
)
def test_each_bit_changes_the_hash(dtype: torch.dtype) -> None:
    values = torch.arange(15).view(3, 5).to(dtype)
    ways = [flipped(values, byte, bit) for byte in range(values.nbytes) for bit in range(8)]
    found = {tuple(hashes_of([values, way])) for way in [values, *ways]}
    assert len(found) == 1 + 8 * values.nbytes


def test_changes_do_not_cancel_out() -> None:
    """Other signs everywhere, numbers that change places, and equal changes of two tensors."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    swapped = values[[1, 0, *range(2, 1000)]]
    two_signs = torch.cat([-values[:2], values[2:]])
    ways = [[values, values], [-values, values], [values, -values], [-values, -values]]
    ways += [[swapped, values], [two_signs, values], [two_signs, two_signs]]
    assert len({tuple(hashes_of(way)) for way in ways}) == len(ways)


def test_large_tensors_have_hashes_of_their_parts() -> None:
    """The place of a word counts over all parts; memory format and cuts do not."""
    values = torch.arange(TWO_MILLION + 3).float()
    exchanged = values.clone()
    exchanged[[0, TWO_MILLION]] = values[[TWO_MILLION, 0]]
    hashes = hashes_of([values])
    assert len(hashes) == 2
    assert hashes != hashes_of([exchanged])
    images = torch.arange(120.0).view(2, 3, 4, 5)
    assert hashes_of([images]) == hashes_of([images.to(memory_format=torch.channels_last)])

"""A layer of batch norm over ranks is, on one rank, torch's own: for every kind of input and of layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hvd_train.network.normalization import SyncBatchNorm, synchronised
from hvd_train.world.world import LocalWorld

pytestmark = pytest.mark.numeric


def values(*shape: int) -> Tensor:
    """Of a magnitude below 1 and a variance that differs from feature to feature."""
    made = torch.sin(torch.arange(float(torch.Size(shape).numel())).view(shape) * 1.7)
    return made * torch.linspace(0.2, 1, shape[1]).view(1, -1, *[1] * (len(shape) - 2))


def both(make: Callable[[], nn.Module], images: Tensor, passes: int = 2) -> list[dict[str, Tensor]]:
    """All that passes of ours, and of torch's own in float64, give."""
    found = []
    for number in range(2):
        layer = make()
        with torch.no_grad():
            for place, parameter in enumerate(layer.parameters()):
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)) * (1 - 2 * place))
        if number:
            layer = layer.double()
        else:
            layer = synchronised(layer, LocalWorld())
            assert isinstance(layer, SyncBatchNorm)
        given = images.to(torch.float64 if number else images.dtype).clone().requires_grad_()
        for turn in range(passes):
            output = layer(given + turn / 8)
        (output.double() * torch.cos(torch.arange(float(images.numel())).view(images.shape))).sum().backward()
        assert given.grad is not None
        gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        found.append({"output": output.detach(), "images": given.grad, **gradients, **dict(layer.named_buffers())})
    return found


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "features": (lambda: nn.BatchNorm1d(3), (5, 3)),
    "sequences": (lambda: nn.BatchNorm1d(3), (5, 3, 4)),
    "images": (lambda: nn.BatchNorm2d(3), (2, 3, 4, 2)),
    "volumes": (lambda: nn.BatchNorm3d(3), (2, 3, 2, 2, 2)),
    "two samples": (lambda: nn.BatchNorm1d(3), (2, 3)),
    "without weights": (lambda: nn.BatchNorm1d(3, affine=False), (5, 3)),
    "without statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (5, 3)),
    "with another eps": (lambda: nn.BatchNorm1d(3, eps=0.5), (5, 3)),
    "with another momentum": (lambda: nn.BatchNorm1d(3, momentum=0.75), (5, 3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_on_one_rank_it_is_torchs_own(kind: str) -> None:
    """Outputs, gradients and statistics, to the rounding of the sums and of what is divided by a standard deviation."""
    make, shape = KINDS[kind]
    images = values(*shape)
    mine, expected = both(make, images)
    assert mine.keys() == expected.keys()
    # Each number comes of some four sums of at most `count` terms below 4, divided up to three times by a standard
    # deviation of at least 0.02 and its square: 1 / 0.02 bounds one division.
    count = images.numel() // images.shape[1]
    tolerance = 4 * count * 4 * 2**-24 / 0.02
    for name, of_torch in expected.items():
        torch.testing.assert_close(mine[name].double(), of_torch.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_it_answers_in_the_numbers_it_was_asked_in(weights: torch.dtype) -> None:
    """It computes in float32; inputs, weights and statistics of 16 bits keep their type, and so do gradients."""
    layer = synchronised(nn.BatchNorm1d(3).to(weights), LocalWorld())
    images = values(4, 3).bfloat16().requires_grad_()
    output = layer(images)
    output.float().square().sum().backward()
    assert images.grad is not None
    assert (output.dtype, images.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    for tensor in (*layer.parameters(), *(p.grad for p in layer.parameters())):
        assert tensor.dtype == weights
    assert [buffer.dtype for buffer in layer.buffers()] == [weights, weights, torch.int64]


def test_one_sample_alone_is_a_batch_without_variance() -> None:
    """Torch refuses it; on ranks the last batch of an epoch may be one, and nothing is divided by zero."""
    layer = synchronised(nn.BatchNorm1d(3), LocalWorld())
    images = torch.tensor([[1.0, 2.0, -4.0]])
    assert layer(images).tolist() == [[0.0, 0.0, 0.0]]
    assert layer.running_var.tolist() == pytest.approx([0.9] * 3, abs=2**-23)
    torch.testing.assert_close(layer.running_mean, images[0] / 10, rtol=0, atol=2**-23)


def test_values_that_are_all_the_same_have_no_variance() -> None:
    """The square of their mean, rounded, may be more than the mean of their squares; there is no root of that."""
    images = (1000 + torch.arange(64.0) / 7).expand(5, 64)
    negative = images.square().mean(0) - images.mean(0).square()
    assert bool((negative < -1e-5).any()), "the case that this test is for"
    layer = synchronised(nn.BatchNorm1d(64), LocalWorld())
    assert bool(layer(images).isfinite().all())
    assert float(layer.running_var.min()) >= 0.9 - 2**-23


def test_statistics_are_no_part_of_the_graph() -> None:
    """Else each pass would keep all passes before it in memory."""
    layer = synchronised(nn.BatchNorm1d(3), LocalWorld())
    for _ in range(2):
        layer(values(4, 3).requires_grad_())
    assert not any(buffer.requires_grad for buffer in layer.buffers())


def test_it_computes_where_its_input_is() -> None:
    """Whatever torch's default device is, which may be set for the whole process."""
    layer = synchronised(nn.BatchNorm1d(3), LocalWorld())
    images = values(4, 3).requires_grad_()
    with torch.device("meta"):
        layer(images).square().sum().backward()
    assert images.grad is not None
    assert {tensor.device.type for tensor in (images.grad, *layer.buffers())} == {"cpu"}

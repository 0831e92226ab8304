"""The operations of a pass, beside what one works out by hand."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hvd_train.network import flops
from hvd_train.network.flops import Operations, fp32_format, operations_of
from hvd_train.network.trial_passes import Trial


def trial(model: nn.Module, *shape: int) -> Trial:
    """Return a pass of random samples of this shape through a model, with the sum of its outputs as the loss."""
    return Trial(
        model,
        lambda model, inputs: model(inputs),
        lambda outputs, targets: outputs.flatten(1).sum(1),
        torch.randn(*shape),
        torch.zeros(shape[0]),
        nullcontext(),
    )


def test_a_linear_layer() -> None:
    """Two for each weight and sample forward, and as many for its gradient; the first layer's inputs have none."""
    assert operations_of(trial(nn.Linear(5, 3), 4, 5)) == Operations(total=2 * (2 * 4 * 5 * 3), in_convolutions=0)
    two = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 7))
    assert operations_of(trial(two, 4, 5)).total == 2 * (2 * 4 * 5 * 3) + 3 * (2 * 4 * 3 * 7)


def test_a_convolution() -> None:
    """Two for each weight and pixel of the output forward, and as many for the gradient of the weights."""
    model = nn.Conv2d(3, 8, 3, padding=1)
    once = 2 * 4 * (6 * 6) * 8 * (3 * 3 * 3)
    assert operations_of(trial(model, 4, 3, 6, 6)) == Operations(total=2 * once, in_convolutions=2 * once)


def test_a_frozen_layer_has_no_gradient() -> None:
    """What is not trained has no backward pass."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
    model[0].requires_grad_(False)
    assert operations_of(trial(model, 4, 5)).total == 2 * 4 * 5 * 3 + 2 * (2 * 4 * 3 * 7)


def test_nothing_changes() -> None:
    """Weights, gradients, statistics and random numbers are those of before."""
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Dropout())
    one_pass = trial(model, 4, 5)
    before, random = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    assert operations_of(one_pass).total > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


class Recurrent(nn.Module):
    """An LSTM, of which torch counts nothing, a Fourier transform, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.fft.fft(self.lstm(x)[0][:, -1]).abs())
        return out


def test_what_torch_does_not_count_is_named() -> None:
    """A number that lacks most of the work would look like a slow machine."""
    found = operations_of(trial(Recurrent(), 4, 3, 5))
    assert any("rnn" in name for name in found.uncounted)
    assert any("fft" in name for name in found.uncounted)


@pytest.mark.parametrize(("in_convolutions", "expected"), [(9, "tf32"), (1, "fp32")])
def test_the_format_is_that_of_most_operations(
    in_convolutions: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 convolutions may use TF32, as torch has it; products of matrices may not, unless that is asked for."""
    settings = SimpleNamespace(
        cudnn=SimpleNamespace(conv=SimpleNamespace(fp32_precision="tf32")),
        cuda=SimpleNamespace(matmul=SimpleNamespace(fp32_precision="none")),
    )
    monkeypatch.setattr(flops.torch, "backends", settings)
    assert fp32_format(Operations(10, in_convolutions)) == expected


def test_older_torch_is_asked_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.9 there was one switch for each."""
    settings = SimpleNamespace(
        cudnn=SimpleNamespace(allow_tf32=False), cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True))
    )
    monkeypatch.setattr(flops.torch, "backends", settings)
    assert fp32_format(Operations(10, 9)) == "fp32"
    assert fp32_format(Operations(10, 1)) == "tf32"

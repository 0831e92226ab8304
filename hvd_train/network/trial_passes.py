"""Passes through the model before training, which leave it as it was: for what only the first pass of a kind shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvd_train.data.trees import Tree, leaves, mapped
from hvd_train.errors import UsageError
from hvd_train.network.buffers import unchanged

_NOT_DETERMINISTIC = " does not have a deterministic implementation"


@dataclass(frozen=True)
class Trial:
    """What passes are made of: a model, its task's forward pass and losses [n], and samples (inputs, targets)."""

    model: nn.Module
    forward: Callable[[nn.Module, Tree], Any]
    losses: Callable[[Any, Tree], Tensor]
    inputs: Tree
    targets: Tree
    autocast: AbstractContextManager[object]

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return leaves(self.inputs)[0].device


def pass_through(trial: Trial, *, train_sizes: list[int], eval_sizes: list[int]) -> None:
    """Pass batches of these sizes through the model, made of the samples; those of training also backwards.

    Weights, buffers, gradients, modes and random numbers are the same afterwards as before.
    """
    model = trial.model
    with _unchanged(model, trial.device):
        for size in train_sizes:
            _forward_and_backward(trial, _samples(trial.inputs, size), _samples(trial.targets, size))
        model.eval()
        with torch.no_grad(), trial.autocast:
            for size in eval_sizes:
                trial.forward(model, _samples(trial.inputs, size))


def pass_once(trial: Trial) -> None:
    """Pass the samples through the model as they are, forward and backward; nothing changes, as in `pass_through`."""
    with _unchanged(trial.model, trial.device):
        _forward_and_backward(trial, trial.inputs, trial.targets)


def check_deterministic(trial: Trial, name: str) -> None:
    """Raise UsageError where the model has an operator that torch has in no deterministic form for this device.

    That is so in VGG and AlexNet on a GPU. torch says so in the first pass that has the operator, not before.
    """
    try:
        pass_through(trial, train_sizes=[len(leaves(trial.inputs)[0])], eval_sizes=[])
    except RuntimeError as error:
        raise not_deterministic(error, name, trial.device) or error from None


def not_deterministic(error: Exception, name: str, device: torch.device) -> UsageError | None:
    """Return the error to raise where `error` is torch's of an operator in no deterministic form, else None."""
    operator, found, _ = str(error).partition(_NOT_DETERMINISTIC)
    if not found:
        return None
    return UsageError(
        f"--deterministic: model {name} needs {operator.split()[-1]}, which torch has in no deterministic form for "
        f"{device.type}: leave out --deterministic, or take another model, such as resnet18"
    )


def _forward_and_backward(trial: Trial, inputs: Tree, targets: Tree) -> None:
    with trial.autocast:
        outputs = trial.forward(trial.model, inputs)
        loss = trial.losses(outputs, targets).sum()
    torch.autograd.grad(loss, [p for p in trial.model.parameters() if p.requires_grad], allow_unused=True)


def _samples(example: Tree, size: int) -> Tree:
    """Return `size` samples in memory of their own, in the layout of the example."""
    return mapped(lambda tensor: torch.cat([tensor] * -(-size // len(tensor)))[:size].clone(), example)


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    with unchanged(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for module, training in modes:
        module.training = training

"""Several optimizers as one: each takes its turns with parameters of its own, and they survive together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hvd_train.errors import UsageError
from hvd_train.network.buffers import buffers_of


class Several(Optimizer):
    """Optimizers by name. The groups and the state are those of all of them, one after the other."""

    def __init__(self, named: Mapping[str, Optimizer]) -> None:
        """Raises UsageError where two of them have the same parameter."""
        self.named = dict(named)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if len({id(parameter) for parameter in parameters}) < len(parameters):
            raise UsageError(f"the optimizers {', '.join(named)} share parameters; each belongs to one of them")
        super().__init__(self.param_groups, {})

    def replaced(self, replace: Callable[[Optimizer], Optimizer]) -> Several:
        """Return these optimizers with what `replace` returns for each in its place."""
        return Several({name: replace(optimizer) for name, optimizer in self.named.items()})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for optimizer in self.named.values() for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: object) -> None:
        """Do nothing: torch's constructor sets an empty list, and then adds the groups."""

    @property  # type: ignore[override]  # torch has a defaultdict
    def state(self) -> dict[Tensor, Any]:
        """What all optimizers know of their parameters."""
        return {parameter: known for optimizer in self.named.values() for parameter, known in optimizer.state.items()}

    @state.setter
    def state(self, state: object) -> None:
        """Do nothing: torch's constructor sets an empty one."""

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Do nothing: torch's constructor adds the groups, which the optimizers have already."""

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give each optimizer its groups and its part of a state, as `load_state_dict` has read them."""
        groups = iter(state["param_groups"])
        for optimizer in self.named.values():
            own = parameters_of(optimizer)
            known = {parameter: state["state"][parameter] for parameter in own if parameter in state["state"]}
            taken = [next(groups) for _ in optimizer.param_groups]
            optimizer.__setstate__({"state": defaultdict(dict, known), "param_groups": taken})

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise TypeError: each optimizer takes its own steps."""
        raise TypeError("each of several optimizers takes its own steps")


def by_name(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return several optimizers by name; a single one has the empty name."""
    return optimizer.named if isinstance(optimizer, Several) else {"": optimizer}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def without_gradients(parameters: list[Tensor]) -> Iterator[None]:
    """Have these parameters require no gradient inside the block."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_()


class Copy:
    """What some optimizers, their parameters and the buffers of a model held, to be put back after a broken step."""

    def __init__(self, optimizers: list[Optimizer], model: nn.Module) -> None:
        self._parameters = [(p, p.detach().clone()) for optimizer in optimizers for p in parameters_of(optimizer)]
        self._states = [
            (optimizer, {parameter: _copied(known) for parameter, known in optimizer.state.items()})
            for optimizer in optimizers
        ]
        self._buffers = [(buffer, buffer.tensor, buffer.tensor.clone()) for buffer in buffers_of(model)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Put everything back; a copy serves once."""
        for parameter, value in self._parameters:
            parameter.copy_(value)
        for optimizer, state in self._states:
            optimizer.state.clear()
            optimizer.state.update(state)
        for buffer, tensor, value in self._buffers:
            buffer.put(tensor)
            tensor.copy_(value)


def _copied(known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in known.items()}

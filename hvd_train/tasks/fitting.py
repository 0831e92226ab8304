"""Whether a task, a model and the data fit together, found out with two samples before anything starts."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from hvd_train import plugin, user_code
from hvd_train.data.trees import Tree, leaves, structure
from hvd_train.errors import HvdTrainError, UsageError
from hvd_train.network.buffers import unchanged
from hvd_train.network.trial_passes import not_deterministic
from hvd_train.tasks.meter import Meter
from hvd_train.tasks.task import Outputs, Task


def fit(
    task: Task,
    model: nn.Module,
    name: str,
    inputs: Tree,
    targets: Tree,
    autocast: AbstractContextManager[object],
) -> Meter:
    """Pass samples through `model`, which stays as it was, measure them, and return the meter of the task.

    Raises UsageError where the model cannot take the inputs, or the task cannot take what it returns.
    """
    count, was_training = len(leaves(inputs)[0]), model.training
    model.eval()
    try:
        with torch.no_grad(), unchanged(model), autocast:
            outputs = _outputs(task, model, name, inputs)
            try:
                wrong = task.refusal(outputs, targets)
                if wrong is not None:
                    raise UsageError(f"model {name} returns {_described(outputs)}; {wrong}")
                return Meter.of(task, outputs, targets, count)
            except (HvdTrainError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever the user's loss and measures raise
                raise UsageError(
                    f"the task cannot take what model {name} returns ({_described(outputs)}) with targets "
                    f"{_described(targets)}: {plugin.first_line(error)}"
                ) from error
    finally:
        model.train(was_training)


def _outputs(task: Task, model: nn.Module, name: str, inputs: Tree) -> Outputs:
    try:
        return task.forward(model, inputs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, AssertionError, TypeError, LookupError, AttributeError) as error:  # so do models
        if not_repeatable := not_deterministic(error, name, leaves(inputs)[0].device):
            raise not_repeatable from None
        place = user_code.place(error)
        reason = str(error).partition("\n")[0] + (f" ({place})" if place else "")
        if isinstance(inputs, Tensor) and inputs.ndim == 4:
            shape = " x ".join(map(str, inputs.shape[1:]))
            raise UsageError(
                f"model {name} cannot take images of {shape}: {reason}; try another --image-size"
            ) from None
        raise UsageError(f"model {name} cannot take inputs {_described(inputs)}: {reason}") from None


def _described(tree: Tree) -> str:
    """Return the shape of a tensor, or how a tree of them is built, in words for the user."""
    return f"shape {tuple(tree.shape)}" if isinstance(tree, Tensor) else structure(tree)

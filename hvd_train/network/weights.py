"""Weights to start from: torchvision's by name, or a plain state_dict in a file of torch.save or safetensors."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any, TypeGuard
from urllib.error import URLError

import torch
from torch import Tensor, nn

from hvd_train import plain_file
from hvd_train.errors import UsageError, unknown_name
from hvd_train.network import safetensors_file
from hvd_train.network.models import head_of, torchvision_names
from hvd_train.weights_file import SAFETENSORS

# Auxiliary classifiers, which help these models to train from random weights; `models.build` leaves them out.
_AUXILIARY = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}

_DAMAGED = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    ImportError,
    struct.error,
)
UNREADABLE = (OSError, RuntimeError, EOFError, MemoryError, pickle.UnpicklingError, *_DAMAGED)
"""The errors that torch.load raises for a file that is damaged or empty, or holds code."""


def why_unreadable(error: Exception) -> str:
    """Return in a few words why torch.load has raised one of UNREADABLE.

    Its own text about a file that holds code is not repeated: it says how to run that code.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
        return "it is damaged, or holds more than tensors, which could run code here"
    return str(error).partition("\n")[0] or type(error).__name__


def tensors_in(path: Path) -> Any:
    """Return the tensors and plain values in a file, on the CPU. Raises one of UNREADABLE where there are none.

    Where the name ends in .safetensors, the file is of that kind. Raises UsageError without the library for that.
    """
    if path.suffix == SAFETENSORS:
        return safetensors_file.read(path)
    with plain_file.opened(path) as file:
        return torch.load(file, map_location="cpu", weights_only=True)


def holds_weights_alone(path: Path) -> bool:
    """Return whether a file is of plain weights: one of torch.save, which is a zip archive, or of safetensors."""
    return path.suffix == SAFETENSORS or plain_file.begins_with(path, b"PK")


def is_state_dict(values: Any) -> TypeGuard[dict[str, Tensor]]:
    """Return whether values that were read from a file are names and tensors, and nothing else."""
    return isinstance(values, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in values.items())


def is_file(weights: str) -> bool:
    """Return whether `weights` is the path of a file rather than a name of torchvision's."""
    return "/" in weights or "." in weights


def check(weights: str, model: str) -> None:
    """Raise UsageError where the file `weights` does not exist, or torchvision has no such weights for `model`."""
    if is_file(weights):
        if not Path(weights).is_file():
            raise UsageError(f"--weights {weights}: no such file")
        if weights.endswith(SAFETENSORS):
            safetensors_file.check_library(f"--weights {weights}")
        return
    if model not in torchvision_names():
        raise UsageError(f"--weights {weights}: torchvision has weights for its own models only, not for {model}")
    names = _names(model)
    if weights not in names:
        raise unknown_name(f"weights of {model}", weights, names)


def start_from(weights: str, model: nn.Module, name: str, num_classes: int) -> str:
    """Load `weights` into `model`, which is called `name`, and return a line that says what was loaded.

    A last layer for another number of classes keeps its random weights. Raises UsageError where other tensors do not
    fit (it lists them), or where the weights cannot be read or fetched (it says where to put the file).
    """
    loaded = _from_file(Path(weights)) if is_file(weights) else _from_torchvision(weights, name)
    loaded = {key: value for key, value in loaded.items() if not key.startswith(_AUXILIARY.get(name, "\n"))}
    own = model.state_dict()
    head = head_of(model)
    differing = {key for key in {**own, **loaded} if _shape(own, key) != _shape(loaded, key)}
    in_head = {key for key in differing if head is not None and key.startswith(f"{head}.") and key in own}
    if misfits := sorted(differing - in_head):
        shown = ", ".join(f"{key} ({_shape(loaded, key)} for {_shape(own, key)})" for key in misfits[:5])
        more = f" and {len(misfits) - 5} more" if len(misfits) > 5 else ""
        raise UsageError(f"--weights {weights} do not fit --model {name}: {shown}{more}")
    model.load_state_dict({**own, **{key: value for key, value in loaded.items() if key not in in_head}})
    new_head = f", but a new last layer ({head}) for {num_classes} classes" if in_head else ""
    return f"starting from the weights {weights}{new_head}"


def _names(model: str) -> list[str]:
    from torchvision.models import get_model_weights

    return list(get_model_weights(model).__members__)


def _from_torchvision(name: str, model: str) -> dict[str, Tensor]:
    """Return torchvision's weights; the ranks of a host fetch the file once, into torch's own folder for such files.

    Raises UsageError where it cannot be fetched.
    """
    from filelock import FileLock
    from torchvision.models import get_model_weights

    weights = get_model_weights(model)[name]
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    path = folder / weights.url.rpartition("/")[2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            return dict(weights.get_state_dict(progress=False, check_hash=True, weights_only=True))
    except (URLError, *UNREADABLE) as error:
        reason = getattr(error, "reason", None) or why_unreadable(error)
        raise UsageError(
            f"--weights {name}: cannot fetch {weights.url} ({reason}): put that file at {path}, or type --weights FILE"
        ) from None


def _from_file(path: Path) -> dict[str, Tensor]:
    try:
        state = tensors_in(path)
    except UNREADABLE as error:
        raise UsageError(f"--weights {path}: cannot be read ({why_unreadable(error)})") from None
    if not is_state_dict(state):
        keys = f" but has {', '.join(map(str, list(state)[:5]))}" if isinstance(state, dict) else ""
        raise UsageError(f"--weights {path}: it must hold a plain state_dict (names and tensors){keys}")
    return state


def _shape(weights: dict[str, Tensor], key: str) -> str:
    return " x ".join(map(str, weights[key].shape)) or "one number" if key in weights else "nothing"

"""Weights to start from: torchvision's by name, or a file with a plain state_dict."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torch import Tensor, nn

from hvd_train.errors import UsageError, unknown_name
from hvd_train.network.models import head_of, torchvision_names

# Classifiers beside the last one, which help these networks to train from random weights; ours are built without.
_AUXILIARY = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}


UNREADABLE = (OSError, RuntimeError, EOFError, pickle.UnpicklingError)
"""What torch.load raises for a file that is damaged, empty, or holds code."""


def is_file(weights: str) -> bool:
    """Whether these are meant as a file, not as a name of torchvision's."""
    return "/" in weights or "." in weights


def check(weights: str, model: str) -> None:
    """Raise UsageError where there is no such file, or torchvision has no weights of that name for the model."""
    if is_file(weights):
        if not Path(weights).is_file():
            raise UsageError(f"--weights {weights}: no such file")
        return
    if model not in torchvision_names():
        raise UsageError(f"--weights {weights}: torchvision has weights for its own models only, not for {model}")
    known = _known(model)
    if weights != "DEFAULT" and weights not in known:
        raise unknown_name(f"weights of {model}", weights, ["DEFAULT", *known])


def start_from(weights: str, model: nn.Module, name: str, num_classes: int) -> str:
    """Load them into `model`; what was loaded, in one line.

    A last layer for other classes stays as it is. Raises UsageError that lists what else does not fit, or says where
    to put a file that cannot be fetched.
    """
    found = _from_file(Path(weights)) if is_file(weights) else _from_torchvision(weights, name)
    found = {key: value for key, value in found.items() if not key.startswith(_AUXILIARY.get(name, "\n"))}
    own = model.state_dict()
    head = head_of(model)
    odd = {key for key in {**own, **found} if _shape(own, key) != _shape(found, key)}
    in_head = {key for key in odd if head is not None and key.startswith(f"{head}.") and key in own}
    if wrong := sorted(odd - in_head):
        shown = ", ".join(f"{key} ({_shape(found, key)} for {_shape(own, key)})" for key in wrong[:5])
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise UsageError(f"--weights {weights} do not fit --model {name}: {shown}{more}")
    model.load_state_dict({**own, **{key: value for key, value in found.items() if key not in in_head}})
    new = f", but a new last layer ({head}) for {num_classes} classes" if in_head else ""
    return f"starting from the weights {weights}{new}"


def _known(model: str) -> list[str]:
    from torchvision.models import get_model_weights

    return list(get_model_weights(model).__members__)


def _from_torchvision(name: str, model: str) -> dict[str, Tensor]:
    """Fetched once for all ranks of a host into torch's own folder of such files."""
    from filelock import FileLock
    from torchvision.models import get_model_weights

    weights = get_model_weights(model)[name]
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    path = folder / weights.url.rpartition("/")[2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            return dict(weights.get_state_dict(progress=False, check_hash=True))
    except (URLError, *UNREADABLE) as error:
        reason = getattr(error, "reason", None) or str(error).partition("\n")[0]
        raise UsageError(
            f"--weights {name}: cannot fetch {weights.url} ({reason}): put that file at {path}, or type --weights FILE"
        ) from None


def _from_file(path: Path) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise UsageError(f"--weights {path}: cannot be read ({str(error).partition(chr(10))[0]})") from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        keys = f" but has {', '.join(map(str, list(found)[:5]))}" if isinstance(found, dict) else ""
        raise UsageError(f"--weights {path}: it must hold a plain state_dict (names and tensors){keys}")
    return found


def _shape(weights: dict[str, Tensor], key: str) -> str:
    return " x ".join(map(str, weights[key].shape)) or "one number" if key in weights else "nothing"

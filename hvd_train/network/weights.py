"""Load initial weights: torchvision's by name, or a file with a state_dict."""

import io
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from hvd_train import plain_file, plugin
from hvd_train.data.trees import map_tensors
from hvd_train.errors import UsageError, first_few, first_line, unknown_name
from hvd_train.network import buffers
from hvd_train.network.models import head_of, torchvision_names

# Auxiliary classifiers help these models to train from random weights; `models.build` leaves them
# out.
_AUXILIARY = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)")
# the first in a file is taken
_PARTS = ("model", "state_dict", "model_state_dict", "model_ema", "state_dict_ema")
_DAMAGED = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    ImportError,
)
UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    MemoryError,
    pickle.UnpicklingError,
    struct.error,
    *_DAMAGED,
)
"""The errors that torch.load raises for a file that is damaged or empty, or holds code."""


def why_unreadable(error: Exception) -> str:
    """Return in a few words why torch.load raised one of UNREADABLE."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
        # torch's own text says how to run the code in the file.
        return "it is damaged, or holds more than tensors, which could run code here"
    return first_line(error)


def tensors_in(path: Path) -> Any:
    """Load tensors and plain values from a file to the CPU. Raises one of UNREADABLE."""
    with plain_file.opened(path) as file:
        return torch.load(file, map_location="cpu", weights_only=True)


def is_file(weights: str) -> bool:
    """Return whether `weights` is a path rather than a name of torchvision."""
    return "/" in weights or "." in weights


def check(weights: str, model: str) -> None:
    """Raise UsageError if there is no such file, or torchvision has no such weights."""
    if is_file(weights):
        if not Path(weights).is_file():
            raise UsageError(f"--weights {weights}: no such file")
        return
    if model not in torchvision_names():
        raise UsageError(
            f"--weights {weights}: torchvision has weights for its own models only, not for {model}"
        )
    from torchvision.models import get_model_weights

    names = list(get_model_weights(model).__members__)
    if weights not in names:
        raise unknown_name(f"weights of {model}", weights, names)


def normalisation(weights: str, model: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel for torchvision's `weights`."""
    from torchvision.models import get_model_weights

    preset = get_model_weights(model)[weights].transforms()
    return tuple(preset.mean), tuple(preset.std)


def start_from(weights: str, model: nn.Module, name: str, num_classes: int) -> str:
    """Load `weights` into the model `name`; return a line for the user.

    Raises UsageError if that fails.
    """
    loaded, part = (
        _from_file(Path(weights)) if is_file(weights) else (_from_torchvision(weights, name), "")
    )
    own = model.state_dict(keep_vars=True)  # two names of a tensor have one object
    state = _with_names_of(own, loaded)
    for key in [key for key in state if key.startswith(_AUXILIARY.get(name, ()))]:
        del state[key]
    given = {id(own[key]) for key in own.keys() & state.keys()}
    head = head_of(model)
    of_head = [key for key in own if key.startswith(f"{head}.") and not is_extra(key)]
    fresh = {key for key in of_head if id(own[key]) not in given}
    for key in state.keys() & of_head:
        if state[key].shape != own[key].shape:
            fresh.add(key)
            del state[key]
    # With the model's version only, torch and torchvision convert the tensors of older files.
    state._metadata = {"": {"version": getattr(model, "_version", None)}}  # type: ignore[attr-defined]
    try:
        _fit_extra_state(state, own)
        missing, unexpected = model.load_state_dict(state, strict=False)
        missing = [key for key in missing if key not in fresh and id(own[key]) not in given]
        found = {"unexpected": unexpected, "missing": missing}
        faults = [f"{what}: {first_few(keys)}" for what, keys in found.items() if keys]
    except (RuntimeError, ValueError) as error:
        faults = [line.strip() for line in str(error).splitlines()[-1:]]
    if faults:
        raise UsageError(f"--weights {weights} do not fit --model {name}: {'; '.join(faults)}")
    new_head = f", but a new last layer ({head}) for {num_classes} classes" if fresh else ""
    return f"starting from the weights {weights}{part}{new_head}"


def load(tensors: Mapping[str, Any], model: nn.Module) -> None:
    """Load a state dict that was saved without torch's version metadata."""
    own = model.state_dict()
    values = buffers.given(tensors)
    may_change = {buffers.plain_name(name): name for name in buffers.may_change_shape(model)}
    names = {buffers.plain_name(name): name for name in own} | may_change
    state = OrderedDict((names.get(plain, plain), value) for plain, value in values.items())
    # MNASNet does not load without them
    state._metadata = own._metadata  # type: ignore[attr-defined]
    buffers.put(model, {name: values[name] for name in may_change.keys() & values.keys()})
    _fit_extra_state(state, own)
    model.load_state_dict(state)


def _fit_extra_state(state: OrderedDict[str, Any], own: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if is_extra(name) and isinstance(value, bytes) and not isinstance(own.get(name), bytes):
            state[name] = io.BytesIO(value)


def is_extra(name: str) -> bool:
    """Return whether a value of a state_dict is what `get_extra_state` of a module has returned."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def for_file(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state_dict as files of weights have it: under the names of a
    model that is not compiled.
    """
    return buffers.given(buffers.kept(state))


def check_state(model: nn.Module, weights_format: str) -> None:
    """Raise UsageError if files cannot hold the state_dict of a model."""
    state = for_file(model.state_dict())
    for name, value in state.items():
        is_dense = isinstance(value, Tensor) and not buffers.is_sparse(value)
        if weights_format == "safetensors" and not is_dense:
            raise UsageError(
                f"--weights-format safetensors: {name} is no dense tensor: leave the flag out"
            )
        if not isinstance(value, Tensor) and why_not_read_again(value):
            raise UsageError(
                f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: let "
                "get_extra_state return tensors, numbers, texts, bytes, and lists or dicts of them"
            )


def why_not_read_again(values: Any) -> str:
    """Return why a file with these values could not be loaded, or an empty text.

    Tensors are left out.
    """
    file = io.BytesIO()
    no_numbers = torch.empty(0)
    try:
        torch.save(
            map_tensors(values, lambda value: no_numbers if type(value) is Tensor else value), file
        )
        torch.load(io.BytesIO(file.getbuffer()), weights_only=True)
    except Exception as error:  # noqa: BLE001  # pickle calls code of the values
        found = re.search(r"GLOBAL (\S+)", str(error))
        return f"it has a {found[1]}" if found else why_unreadable(error)
    return ""


def _with_names_of(
    own: Mapping[str, Tensor], loaded: Mapping[str, Tensor]
) -> OrderedDict[str, Tensor]:
    """Rename loaded tensors to the names of `own`: no prefixes of wrappers,
    and DenseNet's new names.
    """
    new = {
        key: _OLD_DENSENET.sub(r"\1", key.replace("_orig_mod.", ""))
        for key in loaded
        if key not in own
    }
    named = OrderedDict(
        (new.get(key, key), value) for key, value in loaded.items() if new.get(key) != "n_averaged"
    )
    short = named
    while not own.keys() & short.keys() and len(
        {key.partition(".")[0] for key in short}
    ) == 1 < len(short):
        short = OrderedDict((key.partition(".")[2], value) for key, value in short.items())
    return short if own.keys() & short.keys() else named


def _from_torchvision(name: str, model: str) -> dict[str, Tensor]:
    """Return torchvision's weights, fetched once a host into torch's cache.

    Raises UsageError if that fails.
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
            f"--weights {name}: cannot fetch {weights.url} ({reason}): put that file at {path}"
        ) from None


def _from_file(path: Path) -> tuple[Mapping[str, Tensor], str]:
    """Return the tensors in a file and a text that names their part."""
    try:
        content: Any = _safetensors_in(path) if path.suffix == ".safetensors" else tensors_in(path)
    except UNREADABLE as error:
        raise UsageError(f"--weights {path}: cannot be read ({why_unreadable(error)})") from None
    if _is_state(content):
        return content, ""
    if not isinstance(content, dict):
        content = {}
    parts = {str(name): part for name, part in content.items() if part and _is_state(part)}
    for name in (*_PARTS, *(parts if len(parts) == 1 else ())):
        if name in parts:
            return parts[name], f" ({name})"
    keys = first_few(list(content))
    raise UsageError(
        f"--weights {path}: it must hold a plain state_dict (names and tensors) but has {keys}"
    )


def _is_state(content: Any) -> bool:
    return isinstance(content, dict) and all(
        isinstance(name, str) and (isinstance(value, Tensor) or is_extra(name))
        for name, value in content.items()
    )


def _safetensors_in(path: Path) -> dict[str, Tensor]:
    plugin.library("safetensors", f"--weights {path}")
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(plain_file.read_bytes(path, most_bytes=2**40))
    except SafetensorError as error:
        raise ValueError(str(error)) from None

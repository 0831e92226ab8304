"""Models by name: those of torchvision and timm, our small ones, and the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hvd_train import plugin
from hvd_train.errors import UsageError, unknown_name
from hvd_train.network import small
from hvd_train.plugin import TIMM

Builder = Callable[..., nn.Module]
"""A function of the user's that returns a model for a number of classes, or of whatever else the task predicts."""


def check_name(name: str) -> None:
    """Raise UsageError, with the nearest known name, where no model is called `name`.

    The user's own MODULE:FUNCTION is loaded; raises UsageError, too, where that fails or timm is not installed.
    """
    if name in small.MODELS:
        return
    if name.startswith(TIMM):
        timm, name_in_timm = _timm(name), name.removeprefix(TIMM)
        if not timm.is_model(name_in_timm):
            raise unknown_name("model of timm", name_in_timm, timm.list_models())
        return
    if plugin.is_reference(name):
        plugin.check_spelling("model", name)
        plugin.load("model", name)
        return
    known = torchvision_names()
    if name not in known:
        plugin.check_spelling("model", name)
        raise unknown_name("model", name, [*known, *small.MODELS])


def _timm(name: str) -> Any:
    try:
        import timm
    except ImportError:
        raise UsageError(f"--model {name}: timm is not installed: pip install timm") from None
    return timm


def torchvision_names() -> list[str]:
    """Return the names of torchvision's classification models."""
    import torchvision.models  # slow to import

    return list(torchvision.models.list_models(module=torchvision.models))


def head_of(model: nn.Module) -> str | None:
    """Return the name of the last linear or convolutional layer, which makes the logits, or None if there is none."""
    layers = [
        name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    ]
    return layers[-1] if layers else None


def needs_colour(name: str) -> bool:
    """Return whether a model takes images of three channels only, as those of torchvision and timm do."""
    return name not in (*small.MODELS, plugin.OWN) and not plugin.is_reference(name)


def build(name: str, *, num_outputs: int | None, channels: int, seed: int, own: Builder | None = None) -> nn.Module:
    """Return the named model with `num_outputs` outputs, one for each class, with random weights drawn from `seed`.

    `own`, a function of the user's, goes before `name`; it decides about channels by itself, and gets no number of
    outputs where a task has none (None). Raises UsageError where the user's function cannot be loaded or does not
    return a module, where timm is not installed, and where a model that needs a number of outputs gets none.
    """
    torch.manual_seed(seed)
    if own is not None or plugin.is_reference(name):
        make, given = own or plugin.load("model", name), [] if num_outputs is None else [num_outputs]
        try:
            inspect.signature(make).bind(*given)
        except (TypeError, ValueError) as error:
            what = (
                "without an argument, as the task says no `outputs`" if num_outputs is None else f"with {num_outputs}"
            )
            raise UsageError(f"--model {name}: it cannot be called {what}: {error}") from None
        model = make(*given)
        if not isinstance(model, nn.Module):
            raise UsageError(f"--model {name}: it returned {type(model).__name__}, not a torch.nn.Module")
        return model
    if num_outputs is None:
        raise UsageError(
            f"--model {name}: the task says no number of outputs; give it one (`outputs`), or bring a model"
        )
    if name.startswith(TIMM):
        from_timm: nn.Module = _timm(name).create_model(
            name.removeprefix(TIMM), num_classes=num_outputs, in_chans=channels
        )
        return from_timm
    if name in small.MODELS:
        return small.MODELS[name](num_outputs, channels)
    from torchvision.models import get_model  # slow to import, and not every run needs it

    extra = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    model = get_model(name, weights=None, num_classes=num_outputs, **extra)
    assert isinstance(model, nn.Module)
    return model

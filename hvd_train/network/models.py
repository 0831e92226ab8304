"""Build and check models: torchvision's, timm's, a small convnet for digits, or the user's own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hvd_train import plugin
from hvd_train.data.random_numbers import seed_all
from hvd_train.errors import UsageError, described, unknown_name
from hvd_train.plugin import TIMM
from hvd_train.progress.order import BatchLayout

DIGITS_CONVNET = "digits-convnet"
Builder = Callable[[int], nn.Module]  # the user's own function, of the number of classes


def digits_convnet(num_classes: int, channels: int = 1) -> nn.Module:
    """Return a small network: images [batch, channels, 8 or more, 8 or more] to
    logits [batch, num_classes].
    """
    conv = partial(nn.Conv2d, kernel_size=3, padding=1)
    body = (
        conv(channels, 32),
        nn.ReLU(),
        conv(32, 64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        conv(64, 64),
        nn.ReLU(),
    )
    head = (
        _MaxOfQuarters(),
        nn.Flatten(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )
    return nn.Sequential(*body, *head)


class _MaxOfQuarters(nn.Module):
    """AdaptiveMaxPool2d(2), whose gradient on GPUs has a deterministic version here."""

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        return F.max_pool2d(
            images, ((height + 1) // 2, (width + 1) // 2), (height // 2, width // 2)
        )


def check_name(name: str) -> None:
    """Raise UsageError if the model is unknown, does not load, or needs timm."""
    if name.startswith(TIMM):
        timm = plugin.library("timm", f"--model {name}")
        name_in_timm = name.removeprefix(TIMM)
        known = [*timm.list_models(), *timm.list_pretrained()]  # without repositories and folders
        if name_in_timm not in known:
            raise unknown_name("model of timm", name_in_timm, known)
    elif plugin.is_reference(name):
        plugin.load("model", name)
    elif name != DIGITS_CONVNET and name not in (known := torchvision_names()):
        raise unknown_name("model", name, [*known, DIGITS_CONVNET])


def torchvision_names() -> list[str]:
    """Return the names of torchvision's classification models."""
    import torchvision.models  # slow to import

    return list(torchvision.models.list_models(module=torchvision.models))


def suits_channels_last(name: str, model: nn.Module) -> bool:
    """Return whether CPUs compute the model of this name faster with its channels innermost in
    memory: at least half of its convolutions have groups or a kernel of one pixel.

    A model of the user keeps its format, since its code may need it.
    """
    if name == DIGITS_CONVNET:
        return True
    if plugin.is_reference(name):
        return False
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    faster = [layer for layer in convolutions if layer.groups > 1 or layer.kernel_size == (1, 1)]
    return 2 * len(faster) >= len(convolutions) > 0


def put_channels_last(model: nn.Module) -> None:
    """Give weights of four dimensions torch's memory format `channels_last`.

    `Module.to` raises an error for a model that has some of five, such as those of a Conv3d.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.ndim == 4:  # `contiguous` would keep other strides in a kernel of one pixel
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


_LAYERS = nn.Linear, nn.modules.conv._ConvNd


def head_of(model: nn.Module) -> str | None:
    """Return the name of the linear or convolutional layer that is defined last, if any."""
    return next(
        (
            name
            for name, module in reversed([*model.named_modules()])
            if isinstance(module, _LAYERS)
        ),
        None,
    )


def heads_of(model: nn.Module, result: Callable[[], Tensor]) -> tuple[str, ...]:
    """Return the names of the classifiers, as a model of timm knows them, or of the layers
    whose output no other layer takes.

    There may be several, and any may be defined first. `result` runs the model, and depends on its
    output.
    """
    classifiers: Any = getattr(model, "get_classifier", tuple)()
    if not isinstance(classifiers, (tuple, list)):
        classifiers = (classifiers,)
    named = dict(model.named_modules())
    if known := [name for name, module in named.items() if module in classifiers]:
        return tuple(known)
    # the name of the layer, by the node of its output in autograd's graph
    made_by = {}

    hooks = [
        module.register_forward_hook(
            lambda _, __, output, name=name: made_by.update({output.grad_fn: name})
        )
        for name, module in named.items()
        if isinstance(module, _LAYERS)
    ]
    try:
        with torch.enable_grad():
            nodes: set[Any] = {result().grad_fn}
    finally:
        for hook in hooks:
            hook.remove()
    heads = set()
    seen: set[Any] = {None}
    while nodes := nodes - seen:
        seen |= nodes
        heads |= {made_by[node] for node in nodes & made_by.keys()}
        nodes = {before for node in nodes - made_by.keys() for before, _ in node.next_functions}
    return tuple(sorted(heads))


def needs_colour(name: str) -> bool:
    """Return whether a model takes images of three channels only."""
    return name != DIGITS_CONVNET and not plugin.is_reference(name)


def build(
    name: str, *, num_classes: int, channels: int, seed: int, own: Builder | None = None
) -> nn.Module:
    """Return the named model, or `own`'s, with random weights drawn from `seed`.

    Raises UsageError.
    """
    seed_all(seed)
    model: nn.Module
    if own is None and name.startswith(TIMM):
        model = plugin.library("timm", f"--model {name}").create_model(
            name.removeprefix(TIMM), num_classes=num_classes, in_chans=channels
        )
    elif own is not None or plugin.is_reference(name):
        builder: Callable[..., Any] = own or plugin.load("model", name)
        if isinstance(builder, nn.Module):
            raise UsageError(f"--model {name} is a model already: write a function that returns it")
        if num_classes:
            model = plugin.call(f"--model {name}", builder, "num_classes", num_classes)
        elif plugin.takes(builder):
            model = builder()
        else:
            raise UsageError(
                f"--model {name} needs an argument, but a model takes only the number of "
                "classes, and the training set has no attribute `classes`: write a "
                "function without arguments"
            )
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"--model {name}: it returned {type(model).__name__}, not a torch.nn.Module"
            )
    elif name == DIGITS_CONVNET:
        model = digits_convnet(num_classes, channels)
    else:
        from torchvision.models import get_model  # slow to import, and not every run needs it

        extra = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
        model = get_model(name, weights=None, num_classes=num_classes, **extra)
    return model


_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def check_own(model: object) -> None:
    """Raise UsageError if what a program gives as its model is none, has no values, or is
    shared by another library.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is {described(model)}; it must be a torch.nn.Module, or several by name: "
            "{'first': model, 'second': another}"
        )
    kinds = (cls.__name__ for module in model.modules() for cls in type(module).__mro__)
    if wrapper := next((name for name in kinds if name in _PARALLEL), None):
        raise UsageError(f"give the model itself, without {wrapper}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{name} has no shape yet: call the model once, before its optimizer is made"
            )
        if tensor.is_meta:
            raise UsageError(
                f"{name} is on the device meta, without values: make the model on the CPU"
            )


def micro_batch_sizes(layout: BatchLayout, num_samples: int) -> list[int]:
    """Return the sizes of micro-batches in an epoch, the usual one first."""
    batches = layout.batches(range(num_samples)).ends
    return list(
        dict.fromkeys(len(micro) for batch in batches for micro in layout.micro_batches(batch).ends)
    )

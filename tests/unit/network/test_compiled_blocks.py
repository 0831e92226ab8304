"""Compiling block by block: which modules are blocks, and what that is for."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.config as limits
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from hvd_train.network.compiled import blocks_of, compile_blocks
from hvd_train.network.small import digits_convnet
from hvd_train.run import train
from tests.support import runs
from tests.support.runs import Residual


@pytest.fixture
def compile_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Compile with a backend of ours instead, since generating code takes long and decides nothing here."""
    plain: Callable[..., Any] = nn.Module.compile
    torch.compiler.reset()
    counters.clear()
    with limits.patch(cache_size_limit=8, accumulated_cache_size_limit=256):  # as torch has them
        yield lambda backend: monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(plain, backend=backend))


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("resnet18", {"BasicBlock": 8}),
        ("mobilenet_v2", {"Conv2dNormActivation": 2, "InvertedResidual": 17, "Sequential": 1}),
        ("vgg11", {"Sequential": 2}),
        ("vit_b_16", {"EncoderBlock": 12, "Sequential": 1}),
        ("convnext_tiny", {"CNBlock": 18, "Conv2dNormActivation": 1, "Sequential": 4}),
    ],
)
def test_blocks_are_what_repeats(name: str, blocks: dict[str, int]) -> None:
    """The layers that a network is made of: neither its stages, which are chains of them, nor parts of a layer."""
    from torchvision import models

    with torch.device("meta"):
        assert Counter(type(block).__name__ for block in blocks_of(models.get_model(name))) == blocks


class TwoParts(nn.Module):
    """A model of two parts that do not repeat, in a list, of which one has a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), Residual(4)])


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (digits_convnet(10), [""]),
        (TwoParts(), ["parts.0", "parts.1"]),
        (nn.Sequential(nn.Flatten(), TwoParts()), ["1.parts.0", "1.parts.1"]),
        (
            nn.ModuleDict({"one": nn.Sequential(Residual(4), Residual(4)), "two": Residual(4)}),
            ["one.0", "one.1", "two"],
        ),
    ],
    ids=["layers alone", "two parts", "deeper", "in a dictionary"],
)
def test_a_model_in_which_nothing_repeats_has_blocks(model: nn.Module, names: list[str]) -> None:
    """Where nothing repeats they are the innermost parts that are called; layers of torch alone are one block."""
    blocks = blocks_of(model)
    assert [name for name, module in model.named_modules() if module in blocks] == names
    assert len(blocks) == len(names)


def test_gradients_come_as_each_block_ends(compile_with: Callable[[Any], None]) -> None:
    """Those of the last block are there before the backward pass of the first one begins."""
    events: list[str] = []

    def backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*values: Any) -> Any:
            events.append("program")
            return graph(*values)

        return make_boxed_func(run)

    compile_with(aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=backward))
    model = runs.residual(10)
    compile_blocks(blocks_of(model), for_any_size=False)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))  # type: ignore[no-untyped-call]
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    first_begins = max(position for position, event in enumerate(events) if event == "program")
    assert {"5.weight", "2.conv.weight", "2.norm.weight"} <= set(events[:first_begins])
    assert {"1.conv.weight", "1.norm.weight", "0.weight"} <= set(events[first_begins:])


def test_blocks_alike_are_compiled_once(compile_with: Callable[[Any], None]) -> None:
    """As many programs as there are kinds of blocks, however many blocks."""
    compile_with("eager")
    model = nn.Sequential(*[Residual(4) for _ in range(4)])
    compile_blocks(blocks_of(model), for_any_size=False)
    model(torch.randn(2, 4, 8, 8, requires_grad=True))
    assert counters["stats"]["unique_graphs"] == 1


def test_no_block_is_left_uncompiled(compile_with: Callable[[Any], None]) -> None:
    """Left to itself torch compiles 8 programs for a class, and runs what comes after them uncompiled."""
    compile_with("eager")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width + 1), nn.ReLU()) for width in range(4, 13)])
    compile_blocks(blocks_of(model), for_any_size=False)
    for size in (4, 3):
        model(torch.randn(size, 4))
    assert counters["stats"]["unique_graphs"] == 9 * 2


def test_a_rank_alone_has_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient has to travel there, and one program starts sooner and is faster."""
    compiled: list[type[nn.Module]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **how: compiled.append(type(module)))
    train(runs.small_config(epochs=1, compile=True), model=runs.residual, data=runs.few_digits)
    assert compiled == [nn.Sequential]


def test_names_are_as_before_and_copies_are_not_compiled(compile_with: Callable[[Any], None]) -> None:
    """Checkpoints fit a model that is compiled and one that is not; the moving average is a copy."""
    compile_with("eager")
    model, images = runs.residual(10), torch.randn(4, 1, 8, 8)
    names = list(model.state_dict())
    expected: Tensor = copy.deepcopy(model)(images)
    compile_blocks(blocks_of(model), for_any_size=False)
    assert list(model.state_dict()) == names
    assert torch.equal(copy.deepcopy(model)(images), expected)
    assert counters["stats"]["unique_graphs"] == 0
    assert torch.equal(model(images), expected)
    assert counters["stats"]["unique_graphs"] == 1

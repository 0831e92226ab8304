"""Compiling ahead: in which shapes, and what it leaves as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from hvd_train.network import trial_passes
from hvd_train.network.compiled import any_size, blocks_of, compile_blocks, slot_sizes
from hvd_train.progress.order import Cut, InSequence, assignments
from hvd_train.run import train
from hvd_train.step import Steps
from tests.support import runs
from tests.support.tasks import trial_of


@pytest.mark.parametrize(
    ("cut", "num_samples"),
    [(Cut(64, 32), 190), (Cut(64, 64), 128), (Cut(50, 20), 190), (Cut(50, 20), 150), (Cut(64, 64), 30), (Cut(8, 3), 9)],
)
def test_the_sizes_are_those_of_an_epoch(cut: Cut, num_samples: int) -> None:
    """Those of all slots, the most frequent first; nothing is compiled in vain, and nothing later."""
    slots = [len(slot.indices) for step in assignments(InSequence(num_samples), 0, cut, 0, 1) for slot in step.slots]
    assert set(slot_sizes(cut, num_samples)) == set(slots)
    assert slot_sizes(cut, num_samples)[0] == slots[0]


def test_any_size_takes_two() -> None:
    """A size of one is a kind of its own to torch.compile."""
    assert [any_size(sizes) for sizes in ([32], [2], [1], [32, 1])] == [[32, 31], [2, 3], [1, 2], [32, 1]]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without generating code, which takes ten times as long and decides nothing here."""
    plain: Callable[..., Any] = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **how: plain(module, backend="aot_eager", **how))
    torch.compiler.reset()


def test_nothing_but_speed_changes(quick: None) -> None:
    """Weights, running statistics, gradients, modes and random numbers are as before."""
    model, example = nn.Sequential(runs.batch_norm(10), nn.Dropout(0.5)), torch.randn(2, 1, 8, 8)
    model[0][1].eval()
    model[0][0].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes, numbers = [module.training for module in model.modules()], torch.get_rng_state()
    compile_blocks(blocks_of(model), for_any_size=False)
    trial_passes.pass_through(trial_of(model, example), train_sizes=[4, 3], eval_sizes=[5])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("changes", [{}, {"freeze": "0.*", "precision": "bf16"}], ids=["plain", "frozen and bf16"])
def test_an_epoch_compiles_nothing(changes: dict[str, Any], quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is compiled before the first step: also for the last, smaller batch, and for the evaluation."""
    compiled_before: list[int] = []
    plain = Steps.begin

    def begin(*args: Any, **kwargs: Any) -> Any:
        compiled_before.append(counters["stats"]["unique_graphs"])
        return plain(*args, **kwargs)

    monkeypatch.setattr(Steps, "begin", begin)
    counters.clear()
    config = runs.small_config(epochs=2, **changes, compile=True)
    result = train(config, model=runs.batch_norm, data=runs.few_digits)
    assert result.finished
    assert compiled_before[0] > 0
    assert counters["stats"]["unique_graphs"] == compiled_before[0]


@pytest.mark.parametrize("make", [runs.batch_norm, runs.residual])
def test_a_newcomer_has_a_program_for_any_cut(make: Callable[[int], nn.Module], quick: None) -> None:
    """It learns the size of a slot when it meets the others, who would wait while it compiled."""
    model, example = make(10), torch.randn(2, 1, 8, 8)
    counters.clear()
    compile_blocks(blocks_of(model), for_any_size=True)
    trial_passes.pass_through(trial_of(model, example), train_sizes=any_size([32]), eval_sizes=[])
    known = counters["stats"]["unique_graphs"]
    for size in (32, 16, 50):
        model(trial_passes._samples(example, size)).sum().backward()
    assert counters["stats"]["unique_graphs"] == known > 0


class Seen(nn.Module):
    """Notes what comes, in which mode and with which gradients; one of its weights has no part in the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(4, 3), nn.Parameter(torch.ones(2))
        self.passes: list[tuple[list[list[float]], bool, bool]] = []
        self.backward_passes: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        self.passes.append((images.tolist(), self.training, torch.is_grad_enabled()))
        logits: Tensor = self.linear(images)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: self.backward_passes.append(len(gradient)))
        return logits


def test_passes_are_those_of_training_and_then_of_evaluation() -> None:
    """Each size once, the images again and again to fill it; a weight that no pass uses is no error."""
    model, example = Seen(), torch.tensor([[1.0] * 4, [2.0] * 4])
    trial = trial_of(model, example)
    with torch.device("meta"):  # the default, which is not where the model is
        trial_passes.pass_through(trial, train_sizes=[3, 1], eval_sizes=[5])
    one, two = example.tolist()
    assert model.passes == [
        ([one, two, one], True, True),
        ([one], True, True),
        ([one, two, one, two, one], False, False),
    ]
    assert model.backward_passes == [3, 1]
    assert model.training


def test_images_have_memory_of_their_own() -> None:
    """As a loader's have: a view of a larger tensor would be another kind of input to a program."""
    example = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    images = trial_passes._samples(example, 3)
    assert images.shape == (3, 3, 4, 4)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.untyped_storage().nbytes() == images.nbytes

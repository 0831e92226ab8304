"""Models as people bring them: the same on one and two ranks, after a
resume, and in files of weights.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from hvd_train import checkpoint
from hvd_train.errors import UsageError
from hvd_train.network import buffers, optim
from hvd_train.session import Session
from hvd_train.world.world import LocalWorld, World
from tests.support.elastic import TOLERANCE
from tests.support.launching import notes
from tests.support.programs import digits, measure, momentum, take
from tests.support.runs import NUM_VAL, Weights, largest_difference, small_config
from tests.support.worlds import own_generator, run_ranks


class Base(nn.Module):
    """Images to logits; each subclass adds what torch's users add."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 24)
        self.head = nn.Linear(24, 10)

    def features(self, values: Tensor) -> Tensor:
        return values

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(self.body(images.flatten(1))).tanh())


class Cached(Base):
    """As rotary embeddings of Hugging Face: a cache for positions, which a pass replaces by a
    larger one. The first pass may make it, and the module may note its size.
    """

    def __init__(self, places: int = 0) -> None:
        super().__init__()
        self.num_places = 0
        self._make_for(places)

    def _make_for(self, places: int) -> None:
        if places > self.num_places:
            self.num_places = places
            self.register_buffer("cache", torch.arange(float(places)) / 100, persistent=False)

    def features(self, values: Tensor) -> Tensor:
        places = 2 + int(values[0, 0].detach().abs() * 100) % 30
        self._make_for(places)
        return values + self.cache[:places].sum()


class Queue(Base):
    """A saved buffer that is None at first and grows by a row in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", None)

    def features(self, values: Tensor) -> Tensor:
        if self.training:
            row = values.detach().mean(0, keepdim=True)
            self.queue = row if self.queue is None else torch.cat([self.queue, row])
        return values if self.queue is None else values + 0.1 * self.queue.mean(0)


class Late(Base):
    """A buffer that is written by way of `data`, and from the fourth step on only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(24))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def features(self, values: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            if self.passes > 3:
                self.centre.data.lerp_(values.detach().mean(0), 0.1)
        return values - self.centre


class Sparse(Base):
    def __init__(self, layout: Callable[[Tensor], Tensor], *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("adjacency", layout(torch.eye(24).roll(1, 0)), persistent=persistent)

    def features(self, values: Tensor) -> Tensor:
        return values @ self.adjacency.to_dense().T


class Extra(Base):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.loaded = []

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.loaded.append(state)


class Keeps(Base):
    def features(self, values: Tensor) -> Tensor:
        self.last = {"values": [values]}  # with its graph
        return values


def pruned() -> nn.Module:
    model = own_generator(Base())  # the weights decide what is pruned
    prune.l1_unstructured(model.body, "weight", amount=0.5)
    return model


def compiled_inside() -> nn.Module:
    model = Base()
    model.body = torch.compile(model.body, backend="eager")
    return model


MODELS = {
    "a cache of positions": lambda: Cached(2),
    "a cache that a pass makes": Cached,
    "a queue that grows": Queue,
    "a buffer that is written late": Late,
    "a sparse buffer": lambda: Sparse(Tensor.to_sparse),
    "a sparse buffer in blocks": lambda: Sparse(lambda dense: dense.to_sparse_bsr((2, 2))),
    "a sparse buffer that is not saved": lambda: Sparse(Tensor.to_sparse_csr, persistent=False),
    "extra state in a file": lambda: Extra(io.BytesIO(b"abc")),
    "an output that it keeps": Keeps,
    "pruned weights": pruned,
    "compiled": lambda: torch.compile(Base(), backend="eager"),
    "a compiled layer": compiled_inside,
    "double precision": lambda: Base().double(),
}


def made(name: str) -> Any:
    return own_generator(MODELS[name]())


def played(
    world: World,
    model: Any,
    optimizer_of: Callable[[Any], Any] = momentum,
    epochs: int = 2,
    **settings: Any,
) -> Weights:
    """Train a model, and return its tensors, by their names in a model that is not compiled."""
    config = small_config(
        epochs=epochs, ema_decay=0.5, warmup_epochs=0.0, learning_rate=0.1, **settings
    )
    dtype = next(iter(model.parameters())).dtype
    data = digits(90, "train", dtype)  # an epoch has five steps
    val = digits(NUM_VAL, "val", dtype)
    with Session(model, optimizer_of(model), data, config=config, world=world) as session:
        for epoch in session.epochs():
            for step in epoch:
                take(step, model)
            session.keep_best(session.evaluate(val, measure)["loss"], higher=False)
    return {
        buffers.plain_name(name): value.to_dense()
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }


def not_compiled(name: str) -> Any:
    return own_generator(Base()) if "compiled" in name else made(name)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_same_on_any_number_of_ranks_and_resumes(name: str) -> None:
    expected = played(LocalWorld(), made(name), output_dir=Path("alone"))
    played(LocalWorld(), made(name), epochs=1)
    resumed = {"resume": "run", "output_dir": Path("resumed")}
    for found in run_ranks(2, lambda world: played(world, not_compiled(name), **resumed)):
        assert largest_difference(found, expected) <= TOLERANCE
    best = torch.load(Path("alone") / checkpoint.BEST, weights_only=True)
    assert not any("_orig_mod" in key for key in best)
    plain = not_compiled(name)
    if name != "a queue that grows":  # as plain torch, which has no room for it
        plain.load_state_dict(
            {key: io.BytesIO(v) if isinstance(v, bytes) else v for key, v in best.items()}
        )


@pytest.mark.parametrize("state", [{"version": 3}, io.BytesIO(b"abc"), torch.arange(3)], ids=type)
def test_extra_state_is_given_back_as_it_was(state: Any) -> None:
    played(LocalWorld(), own_generator(Extra(state)), epochs=1)
    again = own_generator(Extra(state))
    played(LocalWorld(), again, epochs=2)
    (found, *_) = again.loaded
    assert type(found) is type(state)
    if isinstance(found, io.BytesIO):
        assert found.getvalue() == state.getvalue()
    else:
        assert str(found) == str(state)


@pytest.mark.parametrize(
    ("model", "weights_format", "says"),
    [
        (Extra(Base()), "pt", "_extra_state is a Base, which a checkpoint cannot hold"),
        (Extra({"a": 1}), "safetensors", "_extra_state is no dense tensor: leave the flag"),
        (Sparse(Tensor.to_sparse), "safetensors", "adjacency is no dense tensor"),
    ],
)
def test_what_files_cannot_hold_is_one_line(
    model: nn.Module, weights_format: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        played(LocalWorld(), model, weights_format=weights_format)
    assert not Path("run").exists()


class Registers(Base):
    def features(self, values: Tensor) -> Tensor:
        self.register_buffer("seen", values.detach().mean(0))
        return values


def test_a_saved_buffer_that_a_pass_registers_is_one_line() -> None:
    with pytest.raises(UsageError, match="has registered the buffer seen: register it in __init__"):
        played(LocalWorld(), Registers())


def test_a_model_that_cannot_be_copied_is_one_line() -> None:
    model = Base()
    model.file = Path(__file__).open()  # noqa: SIM115
    with model.file, pytest.raises(UsageError, match="--ema-decay: torch cannot copy the model"):
        optim.copied(model)


@pytest.mark.parametrize(("ranks", "size"), [(1, 5), (2, 5), (2, 10)])
def test_a_buffer_that_each_micro_batch_changes_in_its_own_way_is_noted(
    ranks: int, size: int
) -> None:
    """Once, for the buffers of which a step keeps the first change only, also if a
    rank has one micro-batch.
    """
    run_ranks(
        ranks,
        lambda world: played(world, own_generator(Late()), global_batch_size=20, batch_size=size),
    )
    assert [note.partition(";")[0] for note in notes()] == [
        "each micro-batch of a step has its own changes of centre"
    ]


class Recurrent(Base):
    """Keeps its last hidden state, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = None
        self.count = 0

    def features(self, values: Tensor) -> Tensor:
        self.count += 1
        self.hidden = (values.detach().mean(0),)
        return values


class Counting(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step()


class Normed(Base):
    """A hook of torch sets a `weight` before each pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.spectral_norm(self.head)


@pytest.mark.parametrize(
    ("model", "kind", "names"),
    [
        (Recurrent(), torch.optim.SGD, ["model (count, hidden)"]),
        (Base(), Counting, ["optimizer (steps)"]),
        (Normed(), torch.optim.Adam, []),
    ],
)
def test_plain_attributes_that_are_state_are_noted_once(
    model: nn.Module, kind: Any, names: list[str]
) -> None:
    played(
        LocalWorld(), own_generator(model), lambda model: kind(model.parameters(), lr=0.1), epochs=1
    )
    assert [note.partition("of the ")[2].partition(", which")[0] for note in notes()] == names

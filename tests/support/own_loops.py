"""Programs with loops of their own, as users write them, that take a second or two."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hvd_train
from hvd_train.data.trees import Tree
from hvd_train.own_loop import Session
from hvd_train.result import Result
from hvd_train.state import to_host
from hvd_train.step import Slot, Step
from hvd_train.world.world import World
from tests.support.device import DEVICE
from tests.support.runs import NUM_SAMPLES, NUM_VAL, Weights

TOP1 = hvd_train.mean("top1", better="higher", form=".2%")
WIDTH, NOISE = 6, 3


def digits(count: int, begin: int = 0) -> tuple[Tensor, Tensor]:
    """Return images [count, 1, 8, 8] and labels [count] that are the same in each call."""
    numbers = torch.arange(begin, begin + count)
    return torch.cos(numbers[:, None] * torch.linspace(0.1, 3, 64)).view(count, 1, 8, 8), numbers * 7 % 10


def network() -> nn.Module:
    """Return a network without kinks for such images: rounding stays rounding, so that runs agree to 1e-5."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    _set_weights(model)
    return model


@torch.no_grad()
def _set_weights(model: nn.Module) -> None:
    """Give the model weights that are the same in each call, in whatever thread."""
    for number, parameter in enumerate(model.parameters()):
        parameter.copy_(torch.sin(torch.arange(1.0, parameter.numel() + 1) * (number + 1)).view_as(parameter) / 2)


def score(model: nn.Module, items: Tree) -> Mapping[str, Tensor]:
    """Return the loss and the hits of each image."""
    images, labels = items
    logits = model(images)
    return {"top1": logits.argmax(1) == labels, "loss": F.cross_entropy(logits, labels, reduction="none")}


def settings_of(**changes: Any) -> dict[str, Any]:
    """Return settings of two epochs of ten steps, the last of them smaller; slots do not divide over the ranks."""
    base = {"epochs": 2, "global_batch_size": 20, "batch_size": 4, "output_dir": Path("run"), "device": DEVICE.type}
    return {**base, "workers": 0, "commit_seconds": None, "log_steps": 1, "compression": "none", **changes}


def classify(
    world: World | None, *, each: Callable[[Session, Step], None] = lambda session, step: None, **changes: Any
) -> tuple[Result, Weights]:
    """Train a smooth network on images of classes, and call `each` at the end of each step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    given: dict[str, Any] = {"validation": digits(NUM_VAL, 1000), "measures": [TOP1], "best": "top1"}
    given |= settings_of(**changes)
    with hvd_train.session(model, optimizer, digits(NUM_SAMPLES), world=world, **given) as session:
        for step in session:
            with step:
                for slot in step:
                    images, labels = slot.data
                    logits = model(images)
                    slot.backward(F.cross_entropy(logits, labels), top1=logits.argmax(1) == labels)
                step.finish()
                if step.ends_epoch and given["validation"] is not None:
                    session.evaluate(score)
                each(session, step)
    return session.result, to_host(model.state_dict())


def generate(
    world: World | None,
    *,
    critic_steps: int = 1,
    between: Callable[[Step], None] = lambda step: None,
    rows: Tensor | None = None,
    **changes: Any,
) -> tuple[Result, Weights]:
    """Train a generator and a critic, each with an optimizer of its own; the critic's weights are clipped.

    All is float64: two networks against each other make much of roundings. `between` is called after the turns of the
    critic.
    """
    generator = nn.Sequential(nn.Linear(NOISE, 8), nn.Tanh(), nn.Linear(8, WIDTH))
    critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
    models = nn.ModuleDict({"generator": generator, "critic": critic}).double()
    _set_weights(models)
    optimizers = {
        "critic": torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.5),
        "generator": torch.optim.Adam(generator.parameters(), lr=0.01),
    }
    if rows is None:
        rows = rows_of(NUM_SAMPLES)
    with hvd_train.session(models, optimizers, rows, world=world, **settings_of(**changes)) as session:
        for step in session:
            with step:
                for _ in range(critic_steps):
                    for slot in step.slots("critic"):
                        made = generator(_noise(slot))
                        slot.backward(critic(made).mean() - critic(slot.data).mean())
                    step.finish("critic")
                    with torch.no_grad():
                        for parameter in critic.parameters():
                            parameter.clamp_(-0.6, 0.6)
                between(step)
                for slot in step.slots("generator"):
                    slot.backward(-critic(generator(_noise(slot))).squeeze(1))
                step.finish("generator")
    return session.result, to_host(models.state_dict())


def _noise(slot: Slot) -> Tensor:
    """Return numbers [n, NOISE] that follow from the samples: torch's generator is shared by ranks that are threads."""
    numbers = torch.from_numpy(slot.samples).double()[:, None]
    return torch.cos(numbers * torch.linspace(0.5, 2, NOISE)).to(slot.data.device)


def rows_of(count: int) -> Tensor:
    """Return `count` rows, float64 [count, WIDTH], for the critic to tell from others."""
    return torch.sin(torch.arange(count * WIDTH).double().view(count, WIDTH) * 0.37)


def main() -> None:
    """Train a generator and a critic for so many epochs of 24 steps as the command line says, in 3 slots, slowly."""
    generate(
        None,
        rows=rows_of(24 * 60),
        epochs=int(sys.argv[1]),
        global_batch_size=60,
        batch_size=20,
        commit_seconds=30,
        commit_steps=10,
        ledger=True,
        device="cpu",
        between=lambda step: time.sleep(0.02),
    )

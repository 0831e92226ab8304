"""Small training states, made without a training."""

import torch

from hvd_train.network.device import LossScaler
from hvd_train.progress.order import BatchLayout
from hvd_train.state import TrainState
from tests.support import runs
from tests.support.worlds import own_generator


def state_after(steps: int, *, seed: int = 0) -> TrainState:
    model = own_generator(runs.batch_norm(10), seed)
    state = TrainState(
        model, {"": torch.optim.AdamW(model.parameters(), lr=0.01)}, scaler(), BatchLayout(20, 4)
    )
    for number in range(steps):
        step(state, number)
    return state


def scaler() -> LossScaler:
    return LossScaler("cpu", enabled=False)


def step(state: TrainState, number: int) -> None:
    images = torch.cos(torch.arange(4 * 64.0).view(4, 1, 8, 8) * (number + 1))
    state.optimizer.zero_grad()
    state.model(images).square().mean().backward()
    state.optimizer.step()
    state.progress = state.progress.after_step(20)
    state.totals += runs.totals()

"""The digest of items, and data that are drawn at random."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from hvd_train.config import DataConfig
from hvd_train.data import sources
from hvd_train.data.identity import digest_of_items
from hvd_train.data.own_order import orders_of
from hvd_train.progress.order import UNDECIDED


@dataclass
class Holder:
    value: Any


@pytest.mark.parametrize(
    ("item", "other"),
    [
        (torch.arange(5), torch.tensor([0, 1, 2, 4, 3])),
        (torch.tensor([1.0, 2]), torch.tensor([2.0, 1])),
        (torch.tensor([1.0, 2]), torch.tensor([-1.0, 2])),
        (torch.tensor(1 + 2j), torch.tensor(2 + 1j)),
        (np.array([1.5, 2]), np.array([1.5, 3])),
        (np.array(["a"]), np.array(["b"])),
        (Image.new("L", (2, 2), 3), Image.new("L", (2, 2), 200)),
        ({"x": [1, (2, 3)]}, {"x": [1, (2, 4)]}),
        (Holder(1), Holder(2)),
        (torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse()),
    ],
)
def test_other_items_have_another_digest(item: Any, other: Any) -> None:
    assert digest_of_items([item]) == digest_of_items([item])
    assert digest_of_items([item]) != digest_of_items([other])


def test_rounding_and_objects_without_a_value_do_not_count() -> None:
    """Another processor may round otherwise."""
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert digest_of_items(values) == digest_of_items(values + 1e-7 * torch.sign(values - 0.5))
    assert digest_of_items([object()]) == digest_of_items([object()])


DRAWS = {
    "random": lambda: random.sample(range(40), 40),
    "numpy": lambda: np.random.permutation(40).tolist(),
    "torch": lambda: torch.randperm(40).tolist(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_each_process_draws_the_same_split(draw: Callable[[], list[int]]) -> None:
    def data(config: DataConfig) -> tuple[TensorDataset, None]:
        return TensorDataset(torch.tensor(draw())), None

    def drawn(seed: int) -> list[int]:
        return sources.open_data(DataConfig(), seed, data, any_items=True).train.tensors[0].tolist()

    first = drawn(3)
    torch.rand(1), np.random.rand(), random.random()
    assert drawn(3) == first != drawn(4)


def test_an_order_may_draw_random_numbers() -> None:
    """They are seeded for each epoch, and put back."""
    orders = orders_of(lambda seed, epoch: [*DRAWS["numpy"](), *(40 + torch.randperm(40)).tolist()])
    state = torch.random.get_rng_state()
    first, again, epoch, seed = (
        orders(*of, 80, UNDECIDED)[:].tolist() for of in ((5, 2), (5, 2), (5, 3), (6, 2))
    )
    assert first == again
    assert first not in (epoch, seed, [*range(80)])
    assert torch.equal(torch.random.get_rng_state(), state)

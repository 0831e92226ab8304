"""What a rank builds from the config and its place alone."""

from __future__ import annotations

import os

import pytest
import torch

from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.parts import Own, build, loader_processes
from hvd_train.world.world import Place
from tests.support.runs import convnet, few_digits, small_config


def test_the_parts_fit_one_another() -> None:
    """The example has the shape of the model's input, the loaders have the sets, and each rank builds the same."""
    first, second = (build(small_config(), Place(rank, 2, rank, 2), Own(data=few_digits)) for rank in range(2))
    inputs, targets = first.example
    assert first.model(inputs).shape == (2, 10)
    assert first.meter.losses(first.model(inputs), targets, 2).shape == (2,)
    assert (first.train_loader.num_samples, first.test_loader) == (190, None)
    assert first.val_loader is not None
    assert first.val_loader.num_samples == 60
    weights, same = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_a_model_for_other_images_is_refused_before_anything_starts() -> None:
    """One line that names the shape of the images."""
    with pytest.raises(UsageError, match="cannot take images of 1 x 8 x 8"):
        build(small_config(), Place(), Own(lambda num_classes: torch.nn.Conv2d(3, num_classes, 1), few_digits))
    build(small_config(), Place(), Own(convnet, few_digits))


@pytest.mark.parametrize(
    ("asked", "ranks", "processes"),
    [
        ({}, 1, 4),
        ({}, 4, 2),
        ({}, 16, 1),
        ({"workers": 6}, 4, 6),
        ({"workers": 0}, 1, 0),
        ({"workers_per_host": 6}, 4, 2),
    ],
)
def test_loader_processes_by_default_find_a_core(
    asked: dict[str, int], ranks: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four for a rank, fewer where its share of eight cores is smaller, and as many as one asks for."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    place = Place(size=ranks, local_size=ranks)
    assert loader_processes(Config().replace(**asked).data, place) == processes

"""Copies to a GPU, here with streams that only note what they are told; the stand-in for a GPU has real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hvd_train.data.copies import Copies
from hvd_train.data.map_loader import MapLoader
from hvd_train.progress.order import Cut, EpochOrder, assignments
from tests.support.batches import CPU, PLAIN, RandomItems, flat


class Stream:
    """A stream that notes for whom it waits."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name, self._notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        """Note it."""
        self._notes.append(f"{self._name} wait for {other._name}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What streams are told, in order."""
    notes: list[str] = []
    kernels = Stream("kernels", notes)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        notes.append(f"{stream._name} begin")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copies", notes))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: kernels)
    return notes


def test_kernels_wait_for_copies_and_later_copies_for_them(notes: list[str]) -> None:
    """Neither reads what the other has not written yet, nor writes what it still reads."""
    copies = Copies(CPU)
    first, second = copies.begin(torch.ones(2), torch.zeros(1))
    with copies.use():
        notes.append("used")
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [0.0])
    assert notes == ["copies begin", "kernels wait for copies", "used", "copies wait for kernels"]


def test_a_loader_copies_a_slot_ahead(notes: list[str]) -> None:
    """The copy of the next slot begins when the one before it is prepared; the images are those of other loaders."""
    plain, loader = (MapLoader(RandomItems(), PLAIN, CPU, seed=5, num_workers=0) for _ in range(2))
    loader._copies = Copies(CPU)
    work = list(assignments(EpochOrder(1, 0, 30), 0, Cut(30, 6), 0, 1))
    batches = loader.load(0, work)
    batch = next(batches)
    assert notes == ["copies begin"]
    assert torch.equal(flat([batch]), flat(list(plain.load(0, work))))
    prepared = ["kernels wait for copies", "copies wait for kernels"]
    assert notes == ["copies begin", *[*prepared, "copies begin"] * 4, *prepared]
    assert list(batches) == []

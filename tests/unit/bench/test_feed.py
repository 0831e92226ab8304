"""Batches without an end."""

from __future__ import annotations

from itertools import islice

from hvd_train import recipes
from hvd_train.bench import feed
from hvd_train.parts import build
from hvd_train.progress.order import choose_cut
from hvd_train.world.world import LocalWorld


def test_batches_go_on_after_the_last_epoch() -> None:
    """Each epoch has every sample once, in an order of its own, and another epoch follows."""
    config = recipes.digits().replace(device="cpu", workers=0)
    place = LocalWorld().place
    parts = build(config, place)
    num_samples = parts.train_loader.num_samples
    cut = choose_cut(config.batch, place.size, num_samples)
    steps = -(-num_samples // cut.global_batch)
    try:
        batches = list(islice(feed.batches(parts.train_loader, config, cut, place), 2 * steps))
    finally:
        parts.train_loader.close()
    first, second = (
        [int(sample) % num_samples for batch in epoch for micro in batch.micro_batches for sample in micro.samples]
        for epoch in (batches[:steps], batches[steps:])
    )
    assert sorted(first) == sorted(second) == list(range(num_samples))
    assert first != second

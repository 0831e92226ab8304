"""A run whose images are kept: what goes on with it, and what reads it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from hvd_train import Config, run
from hvd_train.bench import pipeline
from hvd_train.data import cache_folder
from hvd_train.errors import UsageError
from hvd_train.progress.stop import StopSignal
from hvd_train.report import samples
from hvd_train.run import evaluate, train
from hvd_train.world.world import LocalWorld
from tests.support import jpegs
from tests.support.runs import small_config

RUN, CACHE = Path("run"), Path("cache")


@pytest.fixture
def config() -> Config:
    """Return the config of a run of an epoch on images that are reduced from 32 to 27 pixels, and kept."""
    folder = jpegs.digits(Path("data"), range(2), most=16)
    return small_config(
        data="folder",
        data_dir=folder,
        image_size=24,
        cache="disk",
        cache_dir=CACHE,
        model="tests.support.on_demand:flat",
        epochs=1,
        workers=0,
        output_dir=RUN,
        device="cpu",
    )


def test_what_reads_a_run_keeps_no_images(config: Config) -> None:
    """An evaluation sees the same without, and a run of somebody else must not say where files are written."""
    train(config)
    shutil.rmtree(CACHE)
    scores = evaluate(RUN, trust=True)
    assert not CACHE.exists()
    train(config.replace(output_dir=Path("other")))
    assert evaluate(Path("other"), trust=True) == scores


def test_a_run_goes_on_with_the_cache_it_was_begun_with(config: Config) -> None:
    """Without one, crops would come from other pixels; where the cache is does not matter."""
    train(config)
    with pytest.raises(UsageError, match="cache: none, not disk"):
        train(config.replace(cache="none", cache_dir=None))
    train(config.replace(cache_dir=Path("elsewhere")))


def test_a_run_that_has_begun_goes_on_without_room(
    config: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A new one is refused before it has a folder. Images in memory and on a disk are the same to a run."""

    class Signalled(StopSignal):
        """A signal comes before the first step."""

        def __enter__(self) -> StopSignal:
            self.received = signal.SIGTERM
            return super().__enter__()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "StopSignal", Signalled)
        assert not train(config.replace(cache="memory")).finished
    monkeypatch.setattr(cache_folder, "_LEFT_LEAST", 10**18)
    monkeypatch.setattr(cache_folder, "_LEFT_MOST", 10**18)
    with pytest.raises(UsageError, match=r"--cache disk: the reduced images need .* is left to others: name another"):
        train(config.replace(output_dir=Path("other"), cache_dir=Path("full")))
    assert not Path("other").exists()
    capfd.readouterr()
    assert train(config.replace(cache_dir=Path("elsewhere"))).finished
    told = capfd.readouterr().err
    assert told.count("no more images of data/train are kept in elsewhere/") == 1
    assert "is to keep" not in told


def test_each_host_may_have_a_cache_where_it_has_room(config: Config) -> None:
    """Hosts with different disks train together."""
    there = config.replace(cache_dir=Path("elsewhere"))
    assert run.same_everywhere(there) == run.same_everywhere(config)
    assert run.same_everywhere(config.replace(cache="none", cache_dir=None)) != run.same_everywhere(config)


def test_what_only_looks_at_data_keeps_no_images(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a measurement of the input nor a picture of it leaves files that trainings read later."""
    monkeypatch.setattr(pipeline, "WARM_UP_S", 0.0)
    pipeline.measure(config, LocalWorld(), seconds=0.01, repetitions=1)
    samples.show(config, 1, Path("seen.png"))
    assert not CACHE.exists()

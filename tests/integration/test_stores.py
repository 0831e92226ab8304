"""Trainings on shards of an S3 server that is slow, fails and goes away."""

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from hvd_train.data.shards import Shards
from hvd_train.run_files.ledger import audit
from tests.support.launching import (
    HVD_TRAIN,
    PROJECT,
    launch_line,
    output_of,
    ranks_of,
    records,
    started,
    wait_for,
)
from tests.support.runs import Weights, largest_difference
from tests.support.s3 import BUCKET, S3, serving
from tests.support.shards import write_digits

pytestmark = [pytest.mark.integration, pytest.mark.slow]

OF_TESTS = {"PYTHONPATH": str(PROJECT)}
KILLS = 20
COPIES = Path("cache/hvd_train/shards")
ELASTIC = [HVD_TRAIN, "launch", "--elastic", "--np", "2", "--"]
TRAIN = (
    "--model tests.support.shards:network --image-size 8 --augment none --workers 1 "
    "--batch-size 20 --global-batch-size 60 --shuffle-window 60 "
    "--ledger --log-steps 1 --output-dir run"
)


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_digits(tmp_path / "set", 20)
    with serving(tmp_path / "set", monkeypatch) as server:
        yield server


def training(data: str, epochs: int) -> list[str]:
    return [HVD_TRAIN, *f"train --data {data} --epochs {epochs} {TRAIN}".split()]


def steps() -> list[int]:
    return [line["step"] for line in records("step")]


@pytest.mark.parametrize(
    "what", ["it fails", "it fails, elastic", "it hangs", "it hangs, elastic", "a signal"]
)
def test_a_store_that_stays_away_ends_the_job_after_a_commit(
    what: str, s3: S3, tmp_path: Path
) -> None:
    """The last finished step is committed; also if a signal comes while ranks wait for a shard.
    The world does not change meanwhile.
    """
    command = training(f"shards:{BUCKET}", 1000)
    command += ["--data-timeout", "1000" if what == "a signal" else "15"]
    job = [*ELASTIC, *command] if "elastic" in what else launch_line("gloo", 2, *command)
    log = tmp_path / "log.txt"
    with started(job, tmp_path, log, OF_TESTS) as process:
        wait_for("steps", lambda: len(steps()) > 10 or process.poll() is not None)
        s3.hangs = "hangs" in what
        s3.is_away = not s3.hangs
        for path in COPIES.glob("*.tar"):
            path.unlink()
        wait_for("the line", lambda: "waiting for " in log.read_text())
        if what == "a signal":
            process.send_signal(signal.SIGTERM)
        code = process.wait(200)
    output = log.read_text()
    assert code == (128 + signal.SIGTERM if what == "a signal" else 7), output
    last = max(path.name for path in Path("run/checkpoints").iterdir())
    assert last == f"step-{steps()[-1]:010}.ckpt", output
    assert not [event for event in records("event") if event["name"] == "world"], output


def kill_all_after(job: Sequence[str], event: Callable[[], object], seconds: float = 0.0) -> None:
    """Run a job, and kill its launcher and ranks at once some seconds after an event."""
    folder = Path.cwd()
    with started([*job], folder, folder / "log.txt", OF_TESTS) as process:
        wait_for("the event", lambda: event() or process.poll() is not None)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        launcher = psutil.Process(process.pid)
        family = [launcher, *launcher.children(recursive=True)]
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    psutil.wait_procs(family, 60)


def weights(folder: str) -> Weights:
    return torch.load(Path(folder, "model-final.pt"), weights_only=True)


def test_kills_on_changing_ranks_change_nothing(s3: S3, tmp_path: Path) -> None:
    """3 ranks, 1, then 2 elastic workers, of which one is killed: the audit is exact, the weights
    have the bits of one undisturbed local rank, and each shard is fetched about once.
    """
    epochs = 4
    exact = ["--reduction", "exact"]
    local = [*training(f"shards:{tmp_path}/set", epochs), *exact]
    local[local.index("run")] = "alone"
    output_of(local, tmp_path, variables=OF_TESTS)
    size = sum(path.stat().st_size for path in Path("set").glob("*/*.tar"))
    s3.latency_s = 0.05
    s3.fails_every = 50
    s3.fetched = 0
    command = [*training(f"shards:{BUCKET}", epochs), "--commit-steps", "5", *exact]
    kill_all_after(launch_line("gloo", 3, *command), lambda: steps()[-1:] >= [20])
    kill_all_after(command, lambda: steps()[-1:] >= [45])
    log = tmp_path / "log.txt"
    with started([*ELASTIC, *command], tmp_path, log, OF_TESTS) as process:
        wait_for("steps", lambda: steps()[-1:] >= [60] or process.poll() is not None)
        ranks_of(process, HVD_TRAIN)[-1].kill()
        assert process.wait(200) == 0, log.read_text()
    found = audit(Path("run"))
    assert (found.faults, found.epochs) == ((), epochs), log.read_text()
    assert {1, 2, 3} <= {*found.world_sizes}
    assert largest_difference(weights("run"), weights("alone")) == 0
    assert s3.fetched <= 1.3 * size


def test_a_small_cache_fetches_each_shard_about_once_an_epoch(s3: S3, tmp_path: Path) -> None:
    """If it has room for the shards that are shuffled with each other."""
    epochs = 3
    output_of([HVD_TRAIN, "index", BUCKET], tmp_path, variables=OF_TESTS)
    size = sum(path.stat().st_size for path in Path("set").glob("*/*.tar"))
    s3.latency_s = 0.01
    s3.fetched = 0
    command = [*training(f"shards:{BUCKET}", epochs), "--cache-size", str(size // 4)]
    output_of(launch_line("gloo", 2, *command), tmp_path, variables=OF_TESTS)
    assert 0.7 * epochs * size <= s3.fetched <= 1.3 * epochs * size


@pytest.mark.timeout(900)
def test_a_cache_is_whole_after_kills_at_any_moment(s3: S3, tmp_path: Path) -> None:
    """Nothing is left to clean: the next job continues to fetch, and reads what is right."""
    s3.latency_s = 0.02
    command = training(f"shards:{BUCKET}", 1)
    for moment in np.random.default_rng(0).uniform(0, 2, KILLS):
        s3.fetched = 0
        for path in COPIES.glob("*.tar"):
            path.unlink()
        kill_all_after(launch_line("gloo", 2, *command), lambda: s3.fetched, moment)
    output_of(launch_line("gloo", 2, *command), tmp_path, variables=OF_TESTS)
    assert audit(Path("run")).faults == ()
    here = Shards(tmp_path / "set" / "train", decode=dict)
    s3.fetched = 0
    there = Shards(f"{BUCKET}/train", decode=dict)
    assert all(there[n] == here[n] for n in range(len(here)))
    assert not [*COPIES.glob("*.partial")]
    assert s3.fetched < min(path.stat().st_size for path in COPIES.iterdir())

"""Trainings on shards of an S3 server that is slow, fails and goes away."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import (
    HVD_TRAIN,
    PROJECT,
    launch_line,
    records,
    started,
    wait_for,
)
from tests.support.s3 import BUCKET, S3, serving
from tests.support.shards import write_digits

pytestmark = [pytest.mark.integration, pytest.mark.slow]

OF_TESTS = {"PYTHONPATH": str(PROJECT)}
COPIES = Path("cache/hvd_train/shards")
ELASTIC = [HVD_TRAIN, "launch", "--elastic", "--np", "2", "--"]
TRAIN = "--model digits-convnet --image-size 8 --augment none --workers 1 --shuffle-window 60"
TRAIN += " --batch-size 20 --global-batch-size 60 --ledger --output-dir run --log-steps 1"


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_digits(tmp_path / "set", 20)
    with serving(tmp_path / "set", monkeypatch) as server:
        yield server


def training(data: str, epochs: int) -> list[str]:
    return [HVD_TRAIN, "train", "--data", data, "--epochs", str(epochs), *TRAIN.split()]


def steps() -> list[int]:
    return [line["step"] for line in records("step")]


@pytest.mark.parametrize("what", ["it fails", "it fails, elastic", "a signal"])
def test_a_store_that_stays_away_ends_the_job_after_a_commit(
    what: str, s3: S3, tmp_path: Path
) -> None:
    """The last finished step is committed; also if a signal comes while ranks wait for a shard."""
    command = training(f"shards:{BUCKET}", 1000)
    command += ["--data-timeout", "1000" if what == "a signal" else "15"]
    job = [*ELASTIC, *command] if "elastic" in what else launch_line("gloo", 2, *command)
    log = tmp_path / "log.txt"
    with started(job, tmp_path, log, OF_TESTS) as process:
        wait_for("steps", lambda: len(steps()) > 10 or process.poll() is not None)
        s3.is_away = True
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

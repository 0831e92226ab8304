"""Run folders in object storage: real trainings, and a server that speaks S3 in a process of its own."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hvd_train.run_files import remote
from tests.support.launching import started, wait_for
from tests.support.runs import equal
from tests.support.s3_server import S3Server

URL = "s3://bucket-of-tests/runs/first"
EPOCHS = ["--epochs", "2"]
TRAIN = ["train", "digits", "--device", "cpu", "--commit-steps", "3", "--log-steps", "3", "--output-dir"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server with a bucket, which this process and its children use."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    server = S3Server()
    for name, value in server.variables().items():
        monkeypatch.setenv(name, value)
    try:
        server.system().mkdir("bucket-of-tests")
        yield server
    finally:
        server.close()


def command(*words: str) -> list[str]:
    """The program in a process of its own."""
    return [sys.executable, "-m", "hvd_train", *words]


def on(machine: str) -> dict[str, str]:
    """The environment of a machine, whose folder of working folders is all that it has."""
    return {**os.environ, "HVD_TRAIN_REMOTE_DIR": str(Path(machine).resolve())}


def done(*words: str, machine: str = "machine") -> subprocess.CompletedProcess[str]:
    """What a command printed, and how it ended."""
    return subprocess.run(command(*words), env=on(machine), capture_output=True, text=True, timeout=280, check=False)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights of the run in a folder."""
    found: dict[str, torch.Tensor] = torch.load(folder / "model-final.pt", weights_only=True)
    return found


def newest_step(folder: Path) -> int:
    """The step of the newest commit, which is whole to the last byte; 0 without any."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    place = remote.Remote(URL)
    for commit in place.commits(pytest.fail):
        place.fetch(commit, folder)
        return commit.step
    return 0


def has_trained(machine: str) -> bool:
    """Whether the training on a machine has done a step there that is written down."""
    files = list(Path(machine).glob("*/metrics.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    after = [line for line in lines[-3:] if '"kind": "step"' in line]
    return bool(after) and float(re.findall(r'"time": ([0-9.]+)', after[-1])[0]) > Path(machine).stat().st_ctime


def killed_again_and_again(times: int, epochs: int, chance: random.Random) -> None:
    """Train on one empty machine after another, each of which is gone at a random instant; in the end finish."""
    for life in range(times + 1):
        machine, output = f"machine-{life}", Path(f"output-{life}")
        Path(machine).mkdir()
        before = newest_step(Path("seen"))
        with started(command(*TRAIN, URL, "--epochs", str(epochs)), Path.cwd(), output, on(machine)) as process:
            if life == times:
                assert process.wait(280) == 0, output.read_text()
            else:
                if chance.random() < 0.25:  # while it starts, or fetches
                    wait_for("its folder", lambda m=machine: list(Path(m).iterdir()), limit_s=200)  # type: ignore[misc]
                else:
                    wait_for("its first steps", lambda m=machine: has_trained(m), limit_s=200)  # type: ignore[misc]
                time.sleep(chance.uniform(0, 1.5))
                assert process.poll() is None, "more epochs are needed"
                process.kill()
                process.wait(60)
        text = output.read_text()
        assert "damaged" not in text
        if "M parameters" in text:
            resumed = re.search(r"going on at epoch \d+, step (\d+)", text)
            assert int(resumed[1] if resumed else 0) == before, text
        if life < times:
            shutil.rmtree(machine)


def check_against_undisturbed(machine: str, epochs: int) -> None:
    """The weights are those of a run in a plain folder, to the bit, and no record is missing or there twice."""
    assert done(*TRAIN, "undisturbed", "--epochs", str(epochs)).returncode == 0
    shutil.rmtree("whole", ignore_errors=True)
    assert newest_step(Path("whole")) == 23 * epochs
    (worked_on,) = Path(machine).iterdir()
    assert equal(weights(Path("undisturbed")), weights(worked_on))
    assert equal(weights(Path("undisturbed")), weights(Path("whole")))
    steps = [
        re.findall(r'"kind": "step", .*?"step": (\d+)', Path(folder, "metrics.jsonl").read_text())
        for folder in ("undisturbed", "whole")
    ]
    assert len(steps[0]) > 10
    assert steps[0] == steps[1]


@pytest.mark.slow
def test_a_run_whose_machines_are_killed_goes_on_from_a_whole_commit(server: S3Server) -> None:
    """Twice, on an empty machine each time; evaluate, report, export and --resume need no more than the URL."""
    killed_again_and_again(2, 5, random.Random(2))
    check_against_undisturbed("machine-2", 5)
    scored = [done("evaluate", target, "--json", machine="other").stdout for target in (URL, "undisturbed")]
    assert json.loads(scored[0]) == json.loads(scored[1])
    assert done("report", URL, "--output", "page.html", machine="other").returncode == 0
    assert "no predictions" not in Path("page.html").read_text()
    resumed = done("train", "--resume", URL, machine="other")
    assert resumed.returncode == 0, resumed.stderr
    assert "going on at epoch 6, step 115" in resumed.stdout
    assert f"files: {URL}" in resumed.stdout
    anew = done(*TRAIN, URL, "--epochs", "5", "--resume", "never", machine="other")
    assert anew.returncode == 2
    assert "holds a run already" in anew.stderr


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_random_kills(server: S3Server) -> None:
    """Each resume begins from the newest whole commit, and the weights are those of an undisturbed run, to the bit."""
    killed_again_and_again(20, 30, random.Random(20))
    check_against_undisturbed("machine-20", 30)


@pytest.mark.slow
def test_a_service_that_hangs_does_not_stop_a_training(server: S3Server) -> None:
    """It trains on meanwhile, and at its end all is there."""
    with started(command(*TRAIN, URL, *EPOCHS), Path.cwd(), Path("output"), on("machine")) as process:
        wait_for("a commit", lambda: newest_step(Path("seen")) > 0, limit_s=200)
        server.process.send_signal(signal.SIGSTOP)
        try:
            wait_for("the second epoch", lambda: "epoch 2/2  loss" in Path("output").read_text(), limit_s=200)
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert process.wait(200) == 0, Path("output").read_text()
    assert newest_step(Path("seen")) == 46
    assert Path("seen/summary.json").exists()


def test_what_cannot_be_reached_is_one_line_before_anything_starts(server: S3Server) -> None:
    """A bucket that is missing, a service that is down, and no credentials; nothing is left on the machine."""
    train = ["train", "digits", "--device", "cpu", *EPOCHS, "--output-dir"]
    missing = done(*train, "s3://no-such-bucket/run")
    assert missing.returncode == 2
    assert (
        "--output-dir s3://no-such-bucket/run: The specified bucket does not exist; nothing was started"
        in missing.stderr
    )
    server.close()
    down = done(*train, URL)
    assert down.returncode == 2
    assert f"--output-dir {URL}: " in down.stderr
    assert "nothing was started" in down.stderr
    for told in (missing.stderr, down.stderr):
        assert "Traceback" not in told
        assert "test-secret" not in told
    assert not list(Path("machine").rglob("config.yaml"))

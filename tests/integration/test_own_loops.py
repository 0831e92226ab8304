"""Programs with loops of their own under real launchers: that of docs/own-loop.md, the examples, and what ends them."""

from __future__ import annotations

import json
import math
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from hvd_train import checkpoint
from tests.support import documented, jpegs
from tests.support.launching import finished, launch_line, started, wait_for

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import time
import torch
import hvd_train

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.ones(4000, 4)
with hvd_train.session(model, optimizer, rows, batch_size=4, epochs=1, output_dir="run", log_steps=1) as session:
    for step in session:
        with step:
            for slot in step:
                slot.backward(model(slot.data).square().squeeze(1))
            step.finish()
            if sys.argv[1] == "slow":
                time.sleep(0.02)
            elif step.number == 3 and (sys.argv[1] == "all" or session.place.rank == int(sys.argv[1])):
                raise ZeroDivisionError("of mine")
print("not reached" if not session.result.finished else "reached")
"""


def test_the_documented_loop_trains_as_printed(tmp_path: Path) -> None:
    """The loop of docs/own-loop.md reaches on two ranks what it promises, exactly as printed."""
    (tmp_path / "loop.py").write_text(documented.program("loop.py"))
    code, output = finished(launch_line("gloo", 2, sys.executable, "loop.py"), tmp_path)
    assert code == 0, output
    shares = [int(share) for share in re.findall(r"(\d+)% of the last batch are right", output)]
    assert len(shares) == 10, "a line for each epoch, once for all ranks"
    run = next((tmp_path / "runs").glob("loop-*"))
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])["right"] > 0.95


@pytest.mark.parametrize("who", ["1", "all", pytest.param("0", marks=pytest.mark.slow)])
def test_an_error_of_the_program_is_told_once_and_ends_all_ranks(who: str, tmp_path: Path) -> None:
    """With its traceback, without our frames, and with the rank that raised it; exit code 1."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    code, output = finished(launch_line("gloo", 2, sys.executable, "mine.py", who), tmp_path)
    assert code == 1, output
    assert output.count("Traceback") == output.count("ZeroDivisionError: of mine\n") == 1, output
    assert f"rank {'0' if who == 'all' else who} on " in output
    assert "own_loop.py" not in output
    assert "not reached" not in output


def test_a_signal_stops_a_program_with_a_commit_and_it_goes_on_from_there(tmp_path: Path) -> None:
    """What stands after the session is not reached then, and the same command takes the steps that are left."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    line = launch_line("gloo", 2, sys.executable, "mine.py", "slow")
    with started(line, tmp_path, tmp_path / "first.txt") as launcher:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for("steps", lambda: metrics.exists() and '"kind": "step"' in metrics.read_text())
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 128 + signal.SIGTERM
    printed = (tmp_path / "first.txt").read_text()
    assert "stopped by SIGTERM" in printed
    assert "reached" not in printed
    (commit,) = checkpoint.committed(tmp_path / "run")
    done = checkpoint.read(commit)["progress"]["step"]
    code, output = finished(line, tmp_path)
    assert code == 0, output
    assert f"going on at epoch 1, step {done}" in output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 500


@pytest.mark.slow
def test_the_gan_of_the_examples(tmp_path: Path) -> None:
    """On two ranks its discriminator becomes unsure, and it leaves a picture."""
    line = launch_line("gloo", 2, sys.executable, str(ROOT / "examples" / "gan.py"))
    code, output = finished(line, tmp_path)
    assert code == 0, output
    (run,) = (tmp_path / "runs").glob("gan-*")
    epochs = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines() if '"epoch"' in text]
    last = [line for line in epochs if line["kind"] == "epoch"][-1]
    assert 0.9 < last["loss_d"] < 2 * math.log(2) + 0.1
    assert (tmp_path / "digits.png").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("imagenet_horovod.py", "--data-dir data --arch resnet18 --epochs 2 --batch-size 8 --workers 1"),
        ("imagenet_pytorch.py", "data --arch resnet18 --epochs 2 --batch-size 16 --workers 1"),
    ],
)
def test_the_imagenet_examples(program: str, arguments: str, tmp_path: Path) -> None:
    """On JPEG files of six classes, with two ranks: they train, evaluate, and keep the best weights."""
    jpegs.digits(tmp_path / "data", range(6), most=8)
    line = launch_line("gloo", 2, sys.executable, str(ROOT / "examples" / program), *arguments.split())
    code, output = finished(line, tmp_path, 280)
    assert code == 0, output
    (run,) = (tmp_path / "runs").glob("imagenet_*")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"]
    assert math.isfinite(summary["loss"])
    assert torch.load(run / "model-best.pt", weights_only=True)["fc.weight"].shape == (6, 512)

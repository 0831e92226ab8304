"""Real ranks of different speed share the micro-batches of a step."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from hvd_train import checkpoint
from tests.support.launching import json_lines, launch_line, output_of, started, wait_for
from tests.support.runs import largest_difference

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

# Trains some steps or, with 0, until it is stopped; then a pass takes 10 ms of the process's time.
PROGRAM = """
import sys, time
import torch
import torch.nn.functional as F
import hvd_train

steps = int(sys.argv.pop(1))
_, config = hvd_train.parse_args(
    epochs=10**5, global_batch_size=96, batch_size=8, ledger=True
)
inputs = torch.cos(torch.arange(9600.0)).view(480, 20)
model = torch.nn.Linear(20, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(inputs, torch.arange(480) % 2)
with hvd_train.Session(model, optimizer, data, config=config) as session:
    for step in session.steps():
        for micro in step:
            begun = time.process_time()
            while steps == 0 and time.process_time() - begun < 0.01:
                pass
            x, y = micro.batch
            micro.backward(F.cross_entropy(model(x), y, reduction="none"))
        if step.number == steps:
            session.stop("these are all")
"""


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_a_rank_that_is_stopped_half_of_the_time_takes_fewer(launcher: str, tmp_path: Path) -> None:
    """Shares go there and back; each sample counts once; one rank gives the same weights."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    program = "mine.py 0 --output-dir run --balance on"
    command = launch_line(launcher, 2, sys.executable, *program.split())
    metrics = tmp_path / "run" / "metrics.jsonl"
    ended = threading.Event()

    def shares() -> list[list[int]]:
        return [line["owners"] for line in json_lines(metrics) if line.get("name") == "shares"]

    def disturb(process: int) -> None:
        while not ended.wait(0.05):
            os.kill(process, signal.SIGSTOP)
            ended.wait(0.05)
            os.kill(process, signal.SIGCONT)

    with started(command, tmp_path, tmp_path / "job.txt") as job:
        wait_for("steps", lambda: len(json_lines(metrics)) > 5)
        ranks = json.loads((tmp_path / "run/ranks.json").read_text())
        thread = threading.Thread(target=disturb, args=[ranks[1]["process"]])
        thread.start()
        try:
            wait_for("other shares", shares)
        finally:
            ended.set()
            thread.join()
        wait_for("equal shares", lambda: len(shares()) > 1)
        job.send_signal(signal.SIGTERM)
        assert job.wait() == 143, (tmp_path / "job.txt").read_text()
    there, back = shares()[:2]
    assert there.count(1) <= 4
    assert back.count(1) >= 5
    assert "exact: " in output_of(["hvd-train", "audit", "run"], tmp_path)
    stopped = checkpoint.newest_good(tmp_path / "run", pytest.fail)
    assert stopped is not None
    steps = str(stopped["progress"]["step"])
    output_of([sys.executable, "mine.py", steps, "--output-dir", "alone"], tmp_path)
    alone = torch.load(tmp_path / "alone" / "model-final.pt", weights_only=True)
    assert largest_difference(stopped["model"], alone) < 1e-5

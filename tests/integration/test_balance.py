"""Slots dealt by speed, on real ranks of which one is half as fast as the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_train.run_files.ledger import audit
from tests.support.launching import HVD_TRAIN, finished, launch_line

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SLOTS = 12
MODEL = """
import os, time, torch

class Net(torch.nn.Sequential):
    def forward(self, images):
        if self.training:
            time.sleep(0.06 if os.environ.get("HOROVOD_RANK") == "1" else 0.03)
        return super().forward(images)

def model(num_classes):
    return Net(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, num_classes))
"""


def steps_per_second(folder: Path, after: int, before: int) -> float:
    """How many steps a second a run took, from one number of steps to another."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    times = {line["step"]: line["time"] for line in lines if line["kind"] == "step"}
    first, last = min(step for step in times if step > after), max(step for step in times if step <= before)
    return (last - first) / float(times[last] - times[first])


def test_a_rank_of_half_the_speed_gets_fewer_slots(tmp_path: Path) -> None:
    """And the others more; each sample counts once. It prints how much faster steps become: at best 1.6 times."""
    (tmp_path / "mine.py").write_text(MODEL)
    words = f"digits --model mine:model --global-batch-size {SLOTS * 8} --batch-size 8 --max-steps 90 --device cpu "
    words += "--epochs 10 --eval-epochs 10 --log-steps 5 --ledger --output-dir"
    command = launch_line("gloo", 3, HVD_TRAIN, "train", *words.split())
    code, output = finished([*command, "balanced", "--balance"], tmp_path, 150, {"OMP_NUM_THREADS": "1"})
    assert code == 0, output
    lines = [json.loads(line) for line in (tmp_path / "balanced" / "metrics.jsonl").read_text().splitlines()]
    (deal,) = [line for line in lines if line.get("name") == "balance"]
    assert (sum(deal["slots"]), deal["slots"][0] > 4 > deal["slots"][1] >= 1) == (SLOTS, True), deal
    assert "rank 1 on" in deal["message"]
    in_turn = steps_per_second(tmp_path / "balanced", 10, deal["step"])
    by_speed = steps_per_second(tmp_path / "balanced", deal["step"], 90)
    print(f"\n{deal['slots']}: {by_speed:.2f} steps a second, {by_speed / in_turn:.2f} times as many as in turn")
    assert not audit(tmp_path / "balanced").faults

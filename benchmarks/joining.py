"""How long the others stand still while a newcomer is given the state, by the size of the state and the link.

    python -m benchmarks.joining        as root; 10 minutes

Two hosts train, and a third one joins them over a link of so many Mbit/s, in network namespaces of this machine
(tests/support/hosts.py). The pause is the longest time in which no step ended; the time until the newcomer
trains counts from its place in the list of hosts, imports included. Most of the state are weights that are not trained:
what travels beside the steps is the state alone.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.elastic_model import network
from benchmarks.record import RECORDS, about, show
from hvd_train import handover
from tests.support import hosts as cluster
from tests.support.elastic_hosts import job
from tests.support.launching import wait_for

CASES = [(1, 1000), (100, 100), (100, 1000), (500, 1000), (2000, 1000)]
"""Megabytes of the state, and Mbit/s of the link."""


def ballasted(num_classes: int) -> nn.Module:
    """Return the network of `benchmarks.recovery` with a ballast of as many megabytes as the folder's file says."""
    model = network(num_classes)
    count = int(Path("megabytes").read_text()) * 250_000
    ballast = torch.arange(count, dtype=torch.int32).view(torch.float32)
    model.register_parameter("ballast", nn.Parameter(ballast, requires_grad=False))
    return model


def measure(folder: Path, megabytes: int, megabit: int) -> dict[str, object]:
    """Return the figures of one join."""
    folder.mkdir()
    (folder / "megabytes").write_text(str(megabytes))
    training = "--data digits --model benchmarks.joining:ballasted --epochs 100000 --batch-size 20 --augment none"
    training += " --device cpu --eval-epochs 1000 --commit-seconds 10000 --log-steps 1 --output-dir run"
    with (
        cluster.hosts(folder / "cluster", 3, names=3) as hosts,
        job(hosts, folder, listed=("h1", "h2"), training=training.split()) as running,
    ):
        steps = folder / "run/metrics.jsonl"
        wait_for("the first steps", lambda: steps.exists() and '"step"' in steps.read_text(), limit_s=120)
        hosts.limit("h3", megabit)
        listed = time.monotonic()
        running.list("h1", "h2", "h3")
        beside = megabytes * 2**20 > handover.AT_ONCE_BYTES
        wait_for("the newcomer to train", lambda: len(running.changes) > beside, limit_s=600)
        trains = time.monotonic() - listed
        changes = running.changes
    records = [json.loads(line) for line in steps.read_text().splitlines()]
    ended = [record["time"] for record in records if record["kind"] == "step"]
    longest = max(after - before for before, after in itertools.pairwise(ended))
    return {
        "megabytes": megabytes,
        "megabit": megabit,
        "least_s": megabytes * 8 / megabit,
        "meetings_s": [change["seconds"] for change in changes],
        "steps_beside": changes[-1]["step"] - changes[0]["step"],
        "pause_s": longest,
        "until_s": trains,
    }


def main() -> None:
    """Measure each case, print it and write the record."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (megabytes, megabit) in enumerate(CASES):
            rows.append(measure(Path(folder) / str(number), megabytes, megabit))
            print(json.dumps(rows[-1]), flush=True)
    record = {**about("benchmarks.joining", []), "joins": rows}
    show(record, RECORDS / "joining.json")


if __name__ == "__main__":
    main()

"""An elastic job on the stand-in through ten changes of world: nothing of the old worlds stays on the survivor."""

from __future__ import annotations

import json
import os
import signal
from itertools import groupby
from pathlib import Path

import pytest

from hvd_train.run_files.ledger import audit
from tests.fake_gpu.counting import FILE, KINDS
from tests.fake_gpu.launch import OnGpu
from tests.support.launching import started, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).parents[3] / "horovodrun_scripts" / "train_elastic.sh"
ROUNDS = 5  # each of two changes: a worker goes, and another one comes
PASSES = 30  # in each world, and the least of them counts: a loader may be ahead by some batches
WEIGHTS = 4 * (288 * 256 + 256 * 10)  # bytes


@pytest.mark.long
def test_ten_changes_of_world_leave_nothing_on_the_survivor(gpu: OnGpu) -> None:
    """Killed workers and those that leave cost the survivor no communicator, stream, event or memory that stays."""
    hosts, counts = gpu.folder / "hosts", gpu.folder / FILE
    hosts.write_text("localhost:2\n")
    line = [str(SCRIPT), "--discover", "cat hosts", "-np", "2", "--", "digits", "--device", "cuda"]
    line += ["--model", "tests.fake_gpu.counting:model", "--epochs", "4000", "--ledger", "--log-steps", "1"]
    line += ["--output-dir", "run"]

    def samples() -> list[dict[str, int]]:
        return [json.loads(line) for line in counts.read_text().splitlines()] if counts.exists() else []

    def worlds() -> list[list[dict[str, int]]]:
        mine = [sample for sample in samples() if sample["process"] == survivor]
        return [list(group) for _, group in groupby(mine, key=lambda sample: sample["size"])]

    def reached(number: int) -> None:
        """Wait until the survivor has trained for a while in its world of this number."""
        wait_for(f"world {number}", lambda: len(worlds()) >= number and len(worlds()[-1]) > PASSES, limit_s=120)

    output = gpu.folder / "output.txt"
    with started(line, gpu.folder, output, gpu.variables(delay_us=2000)) as script:
        wait_for("the first steps", lambda: len(samples()) > 2 * PASSES + 10, limit_s=120)
        survivor = next(sample["process"] for sample in samples() if sample["rank"] == 0)
        for number in range(ROUNDS):
            if number % 2 == 0:
                os.kill(next(s["process"] for s in reversed(samples()) if s["process"] != survivor), signal.SIGKILL)
            else:
                hosts.write_text("localhost:1\n")
                reached(2 * number + 2)
                hosts.write_text("localhost:2\n")
            reached(2 * number + 3)
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 128 + signal.SIGTERM, output.read_text()
    assert audit(gpu.folder / "run").faults == ()
    text = output.read_text()
    assert text.count(" 0 steps lost") == text.count("steps lost") == 2 * ROUNDS, text
    least = [{kind: min(sample[kind] for sample in world[4:]) for kind in KINDS} for world in worlds()]
    assert len(least) == 2 * ROUNDS + 1
    # The last passes of a world whose other worker is gone may see none.
    assert {max(sample["communicators"] for sample in world) for world in worlds()} == {1}
    for size, first, *_, last in (2, *least[::2]), (1, *least[1::2]):
        assert last["streams"] == first["streams"], f"in worlds of {size}: {least}"
        # Torch keeps events for copies from pinned memory, as many as were ever under way at a time.
        assert last["events"] - first["events"] < ROUNDS - 1, f"in worlds of {size}: {least}"
        # A loader and a step keep batches of other sizes in other worlds, but no world keeps another set of weights,
        # gradients or buffers, nor one more tensor after each change.
        assert last["bytes"] - first["bytes"] < WEIGHTS, f"in worlds of {size}: {least}"
        assert last["pieces"] - first["pieces"] < 2 * (ROUNDS - 1), f"in worlds of {size}: {least}"

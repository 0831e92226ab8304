"""`--resume FILE` with other settings: they hold, or one line refuses them."""

import json
from pathlib import Path
from typing import Any

import pytest

from hvd_train import checkpoint
from hvd_train.errors import UsageError
from hvd_train.progress.order import BatchLayout
from hvd_train.run_files import ledger
from hvd_train.state import Snapshot
from hvd_train.world.world import LocalWorld
from tests.support.launching import notes
from tests.support.runs import RUN, equal, small_config, trained
from tests.support.worlds import StoppingWorld

FIRST = Path("first")
CONSTANT = {"schedule": "constant"}


def file_of(after: int = 15, **settings: Any) -> Path:
    """Return the checkpoint of a run that stops after some steps; an epoch has ten."""
    trained(StoppingWorld(after), small_config(output_dir=FIRST, **settings))
    (file,) = FIRST.glob("checkpoints/*")
    return file


def resumed(file: Path, steps: int | None = 1, **settings: Any) -> tuple[Snapshot, str]:
    """Return the last commit of a run that resumes from the file, and its notes."""
    world = LocalWorld() if steps is None else StoppingWorld(steps)
    trained(world, small_config(resume=str(file), **settings))
    return checkpoint.newest_good(RUN, pytest.fail), "\n".join(notes())


def test_a_finished_run_continues_for_more_epochs() -> None:
    """From its folder; a damaged checkpoint is skipped with a note."""
    settings = {"commit_steps": 4, **CONSTANT}
    _, expected = trained(LocalWorld(), small_config(output_dir=FIRST, epochs=2, **settings))
    before = {path.name: path.read_bytes() for path in FIRST.glob("*.jsonl")}
    newest = checkpoint.committed(FIRST)[0]
    newest.write_bytes(newest.read_bytes()[:-1])
    snapshot, noted = resumed(FIRST, steps=None, epochs=3, **settings)
    assert (snapshot["progress"]["epoch"], snapshot["progress"]["step"]) == (3, 30)
    assert "skipping a damaged checkpoint" in noted
    assert {path.name: path.read_bytes() for path in FIRST.glob("*.jsonl")} == before
    assert not equal(snapshot["model"], expected)


def test_more_epochs_continue_a_finished_run_in_its_folder() -> None:
    """If the schedule does not depend on their number, the run is as if it had begun with it."""
    config = small_config(epochs=4, **CONSTANT, warmup_epochs=0.5)
    _, expected = trained(LocalWorld(), config.replace(output_dir=FIRST))
    trained(LocalWorld(), config.replace(epochs=2))
    summary = RUN / "summary.json"
    trained(StoppingWorld(1), config)
    assert not summary.exists()
    _, weights = trained(LocalWorld(), config)
    assert equal(weights, expected)
    assert json.loads(summary.read_text())["epochs"] == 4
    assert any(note.endswith("continuing for 4 epochs, not 2") for note in notes())
    with pytest.raises(UsageError, match="epochs: 3, not 4"):
        trained(LocalWorld(), config.replace(epochs=3))


def test_settings_of_the_optimizer_hold() -> None:
    snapshot, noted = resumed(file_of(), weight_decay=0.25, momentum=0.5)
    (group,) = snapshot["optimizers"][""]["param_groups"]
    assert (group["weight_decay"], group["momentum"]) == (0.25, 0.5)
    assert "weight_decay" in noted


def test_another_batch_size_holds_and_no_sample_comes_twice() -> None:
    snapshot, _ = resumed(
        file_of(ledger=True), steps=None, ledger=True, epochs=2, global_batch_size=14, batch_size=7
    )
    assert BatchLayout(**snapshot["layout"]) == BatchLayout(14, 7)
    audit = ledger.audit(RUN)
    assert (audit.faults, audit.epochs) == ((), 1)


def test_settings_of_the_checkpoint_keep_its_batch_layout() -> None:
    per_worker = {"global_batch_size": None, "batch_size": 5, "accumulation_steps": 2}
    per_worker["ledger"] = True
    snapshot, noted = resumed(file_of(**per_worker), steps=12, **per_worker)
    assert BatchLayout(**snapshot["layout"]) == BatchLayout(10, 5)
    assert "other settings" not in noted
    assert ledger.audit(RUN).faults == ()


REFUSED = [
    ({"seed": 1}, r"with other settings \(seed: 1, not 0\); start a new run from weights"),
    ({"optimizer": "adamw"}, "optimizer: adamw, not sgd"),
    ({"ema_decay": 0.9}, "ema_decay: 0.9, not None"),
    ({"epochs": 1}, "--epochs 2 or more"),
    ({"global_batch_size": 500}, "--global-batch-size 190"),
]


def test_fixed_settings_are_refused_before_a_folder_is_made() -> None:
    file = file_of()
    for settings, answer in REFUSED:
        with pytest.raises(UsageError, match=answer):
            resumed(file, **settings)
        assert not RUN.exists()

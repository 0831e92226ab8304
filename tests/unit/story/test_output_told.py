"""What rank 0 tells the user about its files: in metrics.jsonl, in the files beside it and on the console."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_train import checkpoint
from hvd_train.output import Output, shows_bar
from hvd_train.progress.metrics import Totals
from hvd_train.run_files import run_folder
from hvd_train.state import TrainState
from hvd_train.world.world import LocalWorld, Place
from tests.support.runs import convnet, small_config, trained
from tests.unit.story.test_output import full_disk, opened


def told(name: str) -> list[str]:
    """The messages of a name in metrics.jsonl."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    return [line["message"] for line in lines if line["kind"] == "event" and line["name"] == name]


def test_a_damaged_checkpoint_is_named(state: TrainState) -> None:
    """The run goes on from the one before, and says which file it could not use."""
    output = opened(small_config(), state)
    for _ in range(2):
        assert output.store.commit_last(state).result()
        state.count_step(Totals((1.0, 2.0, 1.0), 20), skipped=False)
    output.close()
    newest, *_ = checkpoint.committed(Path("run"))
    newest.write_bytes(newest.read_bytes()[:100])
    opened(small_config(), state).close()
    assert state.progress.step == 7
    assert len(told("note")) == 1
    assert str(newest) in told("note")[0]


def test_a_run_that_was_moved_aside_is_named(state: TrainState) -> None:
    """The new run says where the earlier one is now."""
    opened(small_config(), state).close()
    opened(small_config(resume="never"), state).close()
    assert told("note") == ["the earlier run in run is now in run.old"]


def test_a_commit_that_the_disk_does_not_take_is_in_the_records(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its reason, under a name that programs know."""

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    output = opened(small_config(), state)
    monkeypatch.setattr(checkpoint, "write", fails)
    assert not output.commit_last(state)
    output.close()
    (message,) = told("checkpoint")
    assert "No space left on device" in message


def test_other_files_that_the_disk_does_not_take_are_in_the_records(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary has a name of its own, since the exit code rests on it."""
    output = opened(small_config(), state)
    with full_disk(monkeypatch):
        output.write_summary({"top1": 1.0})
        output.write_surroundings(["node1"], None)
    output.close()
    assert told("summary") == ["cannot write run/summary.json: No space left on device"]
    assert told("note") == ["cannot write environment.json: No space left on device"]


def test_a_checkpoint_has_the_config_of_its_run(state: TrainState) -> None:
    """Whoever evaluates or exports it needs nothing else."""
    config = small_config(label_smoothing=0.25)
    output = opened(config, state)
    assert output.commit_last(state)
    output.close()
    (path,) = checkpoint.committed(Path("run"))
    assert checkpoint.read(path)["config"] == config.as_dict()


def test_what_a_run_runs_on_is_written_down(state: TrainState) -> None:
    """The hosts of all ranks, and the GPU of this one."""
    output = opened(small_config(), state)
    output.write_surroundings(["node1", "node1", "node2"], "Sample GPU 3000")
    output.close()
    written = json.loads(Path("run/environment.json").read_text())
    assert (written["world_size"], written["device"]) == (3, "Sample GPU 3000")
    assert written["ranks_of_hosts"] == {"node1": 2, "node2": 1}


def test_a_process_whose_folder_was_taken_over_does_not_say_what_the_run_runs_on(state: TrainState) -> None:
    """Its successor has written that."""
    output = opened(small_config(), state)
    run_folder.take_over(Path("run"))
    output.write_surroundings(["node1"], None)
    output.close()
    assert not Path("run/environment.json").exists()


def test_people_can_read_the_summary(state: TrainState) -> None:
    """One value a line, and a line end at its end."""
    output = opened(small_config(), state)
    output.write_summary({"top1": 0.5, "why": "done"})
    output.close()
    assert Path("run/summary.json").read_text() == '{\n  "top1": 0.5,\n  "why": "done"\n}\n'


@pytest.mark.parametrize(
    ("progress", "size", "terminal", "bar"),
    [
        ("auto", 1, True, True),
        ("auto", 1, False, False),
        ("auto", 2, True, False),
        ("bar", 2, False, True),
        ("lines", 1, True, False),
    ],
)
def test_who_sees_a_bar(progress: str, size: int, terminal: bool, bar: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself a single process on a terminal; whoever asks for a bar, or for lines, has them."""
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert shows_bar(small_config(progress=progress), Place(0, size)) == bar


@pytest.mark.parametrize("progress", ["bar", "lines"])
def test_a_training_shows_what_was_asked_for(progress: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bar is drawn with the control codes of a terminal; lines are plain text."""
    trained(LocalWorld(), small_config(epochs=1, progress=progress), convnet)
    assert ("\x1b[" in capsys.readouterr().out) == (progress == "bar")


def test_an_output_that_never_had_a_folder_can_be_closed() -> None:
    """As that of a process whose training could not begin."""
    output = Output(small_config())
    output.close()
    assert output.path is None

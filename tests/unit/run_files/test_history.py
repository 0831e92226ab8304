"""A run read back from its folder."""

import json
import os
import socket
from datetime import datetime
from pathlib import Path

import pytest

from hvd_train import recipes
from hvd_train.errors import UsageError
from hvd_train.run_files.history import History, read, speeds
from hvd_train.run_files.run_folder import claim
from tests.support.run_folders import epoch, event, start, step, whole_run, write

TORN = 'nonsense\n[1]\n{"kind": "step"}\n{"kind": ["step"], "time": 1}\n{"kind": "st'


def of(*lines: dict[str, object], torn: str = "") -> History:
    return read(write(Path("run"), list(lines), torn=torn))


def test_the_time_between_a_stop_and_the_resume_does_not_count() -> None:
    end = event("end", 2, "stopped by SIGINT at step 1, committed")
    run = of(
        start(),
        step(1),
        end,
        event("note", 9000),
        event("lost", 9000.5),
        start(9001),
        step(2, 9005),
    )
    assert [record["elapsed"] for record in run.steps] == [1.0, 6.0]
    assert run.state.startswith("broke off")


def test_how_it_ended(tmp_path: Path) -> None:
    for message, state in (("stopped by SIGINT", "stopped"), ("done: top-1 60%", "finished")):
        run = read(write(Path(state), [start(), step(1), event("end", 5, message)]))
        assert run.state.startswith(state)
        assert run.ended
    folder = claim(recipes.digits().replace(output_dir=tmp_path / "run"), datetime.now())
    assert read(folder.path).state == "running"
    folder.release()
    for host, state in ((socket.gethostname(), "broke off"), ("elsewhere", "unknown")):
        (folder.path / "environment.json").write_text(json.dumps({"host": host}))
        assert read(folder.path).state.startswith(state)


def test_torn_lines_are_left_out() -> None:
    """A killed process leaves one, and a training may be writing one."""
    run = of(start(), step(1), torn=TORN)
    assert len(run.steps) == 1


def test_settings_of_other_versions_and_missing_files_are_read() -> None:
    folder = write(Path("run"), [start()])
    (folder / "config.yaml").write_text("recipe: old\ngone: 3\n")
    assert read(folder).settings == {"recipe": "old", "gone": 3}
    (folder / "metrics.jsonl").unlink()
    run = read(folder)
    assert run.world_size is run.samples_per_epoch is run.last_write is None
    assert run.seconds == 0


def test_speed_between_the_steps_of_an_epoch() -> None:
    run = of(start(), step(9), step(10), epoch(1, 60.0), step(11, 61.0), step(12, 63.0))
    assert speeds(run.steps) == ([9.5, 62.0], [100.0, 50.0])
    assert speeds(run.steps, 1)[1] == [pytest.approx(200 / 3)]


def test_progress_of_records() -> None:
    run = of(
        start(), step(8), event("world", 9), step(10), epoch(1), step(11, 21), event("world", 30)
    )
    samples = [record["samples_done"] for record in (*run.steps, *run.epochs)]
    assert samples == [800, 1000, 1100, 1000]
    assert [record["epochs_done"] for record in run.events] == [0.0, 0.8, 1.1]
    (change,) = read(write(Path("lost"), [step(1), event("world", 2)])).events
    assert change["epochs_done"] is None


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "summary.json", "environment.json"]
)
def test_a_damaged_or_planted_file_is_one_line(name: str) -> None:
    run = write(Path("run"), whole_run(), summary=True)
    file = run / name
    for content in ("[" * 100_000, "[1, 2]", '"text"'):
        file.write_text(content)
        if name == "metrics.jsonl":  # lines are left out
            assert read(run).steps == ()
        else:
            with pytest.raises(UsageError, match=f"^run/{name} is damaged"):
                read(run)
    os.truncate(file, 2**40)
    with pytest.raises(UsageError, match=f"^cannot read run/{name}: it is larger than "):
        read(run)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(
        UsageError, match=f"^cannot read run/{name}: it is no file, but a pipe or a device"
    ):
        read(run)

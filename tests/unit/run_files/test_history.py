"""A run read back from its folder, whatever has befallen it."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from hvd_train.errors import UsageError
from hvd_train.run_files.history import History, read_run, speeds, split_of, spreads_of_ranks, thinned
from hvd_train.run_files.metrics_file import number as number_of
from hvd_train.run_files.run_folder import claim
from tests.support.run_folders import epoch, event, start, step, whole_run, write


def of(*lines: dict[str, object], torn: str = "") -> History:
    return read_run(write(Path("run"), list(lines), torn=torn))


def test_a_run_that_went_well() -> None:
    """Settings, records by their kind, ranks and samples are read, and the run has ended."""
    run = read_run(write(Path("run"), whole_run(), summary=True))
    assert (len(run.steps), len(run.epochs), len(run.events)) == (30, 3, 2)
    assert run.settings["model"] == "digits-convnet"
    assert (run.world_size, run.samples_per_epoch, run.num_epochs) == (2, 1000, 3)
    assert (run.state, run.ended, run.seconds) == ("finished", True, 31.0)
    assert read_run("run").epochs == run.epochs
    assert all(type(record) is dict for record in (*run.steps, *run.epochs, *run.events, run.summary, run.settings))


def test_the_time_between_a_stop_and_the_resume_does_not_count() -> None:
    """A run that was stopped overnight has not trained for a night; the pause ends with the notes before its start."""
    lines = (
        start(),
        step(1),
        event("end", 2, "stopped by SIGINT at step 1, committed"),
        event("note", 9000),
        start(9001),
    )
    run = of(*lines, step(2, 9005))
    assert [record["elapsed"] for record in run.steps] == [1.0, 7.0]
    assert run.state == "broke off"


@pytest.mark.parametrize(
    ("last", "state"),
    [("stopped by SIGINT at step 4, committed", "stopped"), ("done: top-1 60%", "finished"), (None, "broke off")],
)
def test_how_it_ended(last: str | None, state: str) -> None:
    """The last event says it; without one, and with nobody training in the folder, the run broke off."""
    end = [] if last is None else [event("end", 5, last)]
    assert of(start(), step(1), *end).state == state


def test_who_trains_in_it_is_seen_and_not_disturbed(tmp_path: Path) -> None:
    """A run is running as long as its process has claimed the folder; reading does not disturb the claim."""
    from datetime import datetime

    from hvd_train import recipes

    folder = claim(recipes.digits().replace(output_dir=tmp_path / "run"), datetime.now())
    assert read_run(folder.path).state == "running"
    folder.release()
    assert read_run(folder.path).state == "broke off"


@pytest.mark.parametrize(("host", "state"), [(socket.gethostname(), "broke off"), ("elsewhere", "unknown")])
def test_what_runs_elsewhere_cannot_be_judged(host: str, state: str) -> None:
    """The state is unknown where the run belongs to another machine: its process may well be alive."""
    write(Path("run"), [start(), step(1)])
    Path("run/environment.json").write_text(json.dumps({"host": host}))
    assert read_run(Path("run")).state == state


def test_damage_is_named_and_the_rest_is_read() -> None:
    """A torn last line, lines that are no records, a broken config.yaml and summary.json: each gap names its file."""
    run = of(start(), step(1), torn='{"kind": "step", "ti')
    assert len(run.steps) == 1
    assert any("last line of metrics.jsonl is torn" in gap for gap in run.gaps)
    folder = write(Path("worse"), [start()], torn='nonsense\n[1]\n{"kind": "step"}\n')
    (folder / "config.yaml").write_text("[")
    (folder / "summary.json").write_text("[]")
    gaps = "\n".join(read_run(folder).gaps)
    assert "3 lines of metrics.jsonl cannot be read, the first of them line 2" in gaps
    assert "config.yaml is not what a run writes" in gaps
    assert "summary.json cannot be read" in gaps


def test_settings_of_another_version_are_shown() -> None:
    """Settings that this version does not know are read all the same."""
    folder = write(Path("run"), [start()])
    (folder / "config.yaml").write_text("recipe: old\ndata: {gone: 3}\n")
    assert read_run(folder).settings == {"recipe": "old", "gone": 3}


def test_empty_and_missing_metrics_are_gaps() -> None:
    """A run that was killed right after it had made its folder is read, with what it lacks."""
    assert any("metrics.jsonl is empty" in gap for gap in of().gaps)
    Path("run/metrics.jsonl").unlink()
    run = read_run(Path("run"))
    assert any("no metrics" in gap for gap in run.gaps)
    assert (run.world_size, run.samples_per_epoch, run.seconds, run.last_write) == (None, None, 0.0, None)


def test_what_is_no_run_is_refused() -> None:
    """The error names the reason, and what to type where the folders inside are runs."""
    Path("empty").mkdir()
    Path("file").touch()
    write(Path("sweep/one"), [])
    for name, reason in (("no", "no such"), ("file", "is a file"), ("empty", "not a run"), ("sweep", r"sweep/\*")):
        with pytest.raises(UsageError, match=reason):
            read_run(Path(name))


def test_speed_is_that_between_two_lines_of_an_epoch() -> None:
    """Evaluations lie between epochs and do not count, waiting for another world does."""
    run = of(start(), step(9), step(10), epoch(1, 60.0), step(11, 61.0), step(12, 63.0))
    assert speeds(run) == ([9.5, 62.0], [100.0, 50.0])
    assert speeds(run, 1)[1] == [pytest.approx(200 / 3)]


def test_the_split_is_the_mean_of_the_records_that_have_one() -> None:
    """A run of an earlier version has none, or one without commits."""
    split = {"data": 0.1, "forward": 0.2, "backward": 0.3, "reduction": 0.1, "optimizer": 0.1, "other": None}
    run = of(start(), step(1), step(2, split=split), step(3, split={**split, "data": 0.3}), step(4, split="nonsense"))
    assert split_of(run) == pytest.approx({**split, "data": 0.2, "other": 0.0, "commit": 0.0})
    assert split_of(read_run(write(Path("old"), whole_run()))) is None


def test_the_spread_over_ranks_is_the_mean_of_the_records_that_have_one() -> None:
    """The slowest rank is the one that is it most often; whatever else may stand there is passed over."""
    ranks = [
        {"work": [0.1, 0.2, 0.3, 1]},
        {"work": [0.3, 0.4, 0.5, 2], "data": [0, 0, 1, 0]},
        {"work": [0.2, 0.3, 0.4, 2]},
    ]
    odd = [
        {"work": [1, 2, 3]},
        {"work": ["a", 1, 1, 1]},
        {"work": [1, 1, 1, 0.5]},
        {"work": [-1, 1e300, 1, 1]},
        [],
        "nonsense",
    ]
    run = of(start(), step(1), *(step(number, ranks=of_ranks) for number, of_ranks in enumerate([*ranks, *odd], 2)))
    found = spreads_of_ranks(run)
    assert {*found} == {"work", "data"}
    assert vars(found["work"]) == pytest.approx({"least": 0.2, "median": 0.3, "most": 0.4, "slowest": 2})
    assert spreads_of_ranks(read_run(write(Path("old"), whole_run()))) == {}


def test_where_a_step_lies_between_lines() -> None:
    """The samples at a step follow from the records before and after it."""
    run = of(start(), step(10), step(20))
    assert [run.samples_at(number) for number in (0, 5, 10, 15, 20, 99)] == [0, 500, 1000, 1500, 2000, 9900]
    assert read_run(write(Path("none"), [start()])).samples_at(3) is None


def test_thinning_keeps_gaps() -> None:
    """A point is the mean of its neighbours, and a gap where none of them has a value."""
    x, y = thinned(list(range(6)), [1.0, 3.0, None, None, None, 5.0], most=3)
    assert x == [0.5, 2.5, 4.5]
    assert y == [2.0, None, 5.0]
    assert thinned([], []) == ([], [])


DEEP = "[" * 100_000


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "environment.json"])
@pytest.mark.parametrize("content", [DEEP, "[1, 2]", "7", '"text"', "null", '{"kind": ["step"], "time": 1}'])
def test_files_of_any_content_are_gaps(name: str, content: str) -> None:
    """Nesting without end and values of other types end neither the reading nor the page."""
    run = write(Path("run"), whole_run(), summary=True)
    (run / name).write_text(content)
    read_run(run)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "environment.json"])
def test_pipes_and_holes_in_the_place_of_files_are_gaps(name: str) -> None:
    """Neither is a pipe waited for that nobody writes into, nor does a file of a terabyte come into memory."""
    too_large = "a line of it is longer than " if name == "metrics.jsonl" else "it is larger than "
    run = write(Path("run"), whole_run(), summary=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert any(f"{name} cannot be read (it is no file, but a pipe or a device)" in gap for gap in read_run(run).gaps)
    (run / name).unlink()
    (run / name).touch()
    os.truncate(run / name, 2**40)
    assert any(f"{name} cannot be read ({too_large}" in gap for gap in read_run(run).gaps)


def test_a_bomb_of_aliases_is_a_gap() -> None:
    """A few hundred bytes of YAML that stand for gigabytes are not expanded."""
    run = write(Path("run"), whole_run())
    lines = ["a0: &a0 x"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (run / "config.yaml").write_text("\n".join(lines))
    gaps = read_run(run).gaps  # a name of its own: a failed test would print the whole run, that is the gigabytes
    assert "no settings: config.yaml is not what a run writes" in gaps


def test_numbers_beyond_all_runs_are_none() -> None:
    """JSON has whole numbers of any length, and those do not fit where numbers are drawn."""
    run = of(start(num_samples=10**400), step(1, loss=10**400))
    assert run.samples_per_epoch is None
    assert number_of(run.steps[0], "loss") is None

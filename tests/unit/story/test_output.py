"""The run folder on rank 0: who has it, what is written into it, and what happens when the disk is full."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvd_train import checkpoint
from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.launch import launcher
from hvd_train.output import Output, shows_bar
from hvd_train.progress.order import Cut
from hvd_train.run_files import durable, run_folder
from hvd_train.run_files.journal import SilentJournal
from hvd_train.run_files.ledger import Entry
from hvd_train.state import Progress, TrainState
from hvd_train.world.world import Place
from tests.support.runs import small_config


def first_cut() -> Cut:
    """The cut of a run that starts."""
    return Cut(20, 4)


def opened(config: Config, state: TrainState) -> Output:
    """The output of rank 0, with its folder claimed and open."""
    output = Output(config)
    output.open(output.claim(state, None, first_cut, from_disk=True), state, Place())
    return output


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Writing a whole file fails inside this block."""

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_text", fails)
        yield


def test_a_rank_without_the_folder_writes_nothing(state: TrainState) -> None:
    """Its journal and its store take everything, and no file appears."""
    output = Output(small_config())
    output.open(None, state, Place(rank=1, size=2))
    output.journal.event("note", "unheard")
    output.store.save_weights(checkpoint.BEST, state)
    output.write_summary({"top1": 1.0})
    assert (output.path, output.store.commit(state), output.commit_last(state)) == (None, True, False)
    output.close()
    assert not Path("run").exists()


def test_a_claimed_folder_is_refused_to_a_second_process_and_free_after_close(state: TrainState) -> None:
    """One training writes into a folder at a time."""
    first = opened(small_config(), state)
    with pytest.raises(UsageError, match="another process is training in run"):
        Output(small_config()).claim(state, None, first_cut, from_disk=True)
    first.close()
    opened(small_config(), state).close()


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_batch_that_does_not_fit_leaves_all_as_it_was(state: TrainState, resume: str) -> None:
    """No folder is made, and none is moved aside: the next command is not told that it has other settings."""

    def refused() -> Cut:
        raise UsageError("too large")

    for earlier in ([], [Path("run")]):
        if earlier:
            opened(small_config(), state).close()
        where = small_config(resume="never") if earlier else small_config(resume=resume)
        with pytest.raises(UsageError, match="too large"):
            Output(where).claim(state, None, refused, from_disk=True)
        assert list(Path().iterdir()) == earlier


def test_the_newest_checkpoint_is_loaded_where_the_state_is_to_come_from_disk(state: TrainState) -> None:
    """And not where another rank has a newer state."""
    output = opened(small_config(), state)
    assert output.commit_last(state)
    output.close()
    for from_disk, step in ((False, 9), (True, 7)):
        state.progress = state.progress.after_step(20).after_step(20) if not from_disk else state.progress
        again = Output(small_config())
        claim = again.claim(state, None, first_cut, from_disk=from_disk)
        assert (claim.loaded, state.progress.step) == (from_disk, step)
        again.open(claim, state, Place())
        again.close()


def test_a_job_takes_its_own_folder_over_and_starts_no_new_run(
    state: TrainState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --output-dir too: a driver that was started again waits for workers of before, and then for no longer."""
    monkeypatch.setattr("hvd_train.output._PATIENCE_SECONDS", 0.2)
    for name, value in ((launcher.OWNER, "job"), ("HOROVOD_ELASTIC", "1")):
        monkeypatch.setenv(name, value)
    config = small_config(output_dir=None, recipe="few")
    former = opened(config, state)
    assert former.commit_last(state)
    latter = Output(config)
    claim = latter.claim(state, None, first_cut, from_disk=True)
    assert (claim.folder.path, claim.loaded) == (former.path, True)
    assert not former.commit_last(state)
    assert f"another process is training in {former.path}: waiting" in capsys.readouterr().err
    monkeypatch.setenv(launcher.OWNER, "another job")
    others = Output(config).claim(state, None, first_cut, from_disk=True)
    assert others.folder.path != former.path
    assert not others.folder.earlier
    former.close()


def test_the_file_that_was_named_counts_until_there_is_a_commit(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose workers all die before that begins with the file again, and not with random weights."""
    output = opened(small_config(output_dir=Path("earlier")), state)
    assert output.commit_last(state)
    output.close()
    (file,) = Path("earlier/checkpoints").iterdir()
    monkeypatch.setenv(launcher.OWNER, "job")
    config = small_config(resume=str(file))
    for _ in range(2):
        state.progress = Progress()
        claim = Output(config).claim(state, None, first_cut, from_disk=True)
        assert (claim.loaded, claim.from_file, state.progress.step) == (True, True, 7)
        claim.folder.release()
    output = opened(config, state)  # commits what it has from the file
    output.close()
    file.unlink()
    state.progress = Progress()
    claim = Output(config).claim(state, None, first_cut, from_disk=True)
    assert (claim.folder.path, claim.loaded, claim.from_file) == (Path("run"), True, False)
    assert state.progress.step == 7
    claim.folder.release()


def test_a_process_whose_folder_was_taken_over_commits_nothing(state: TrainState) -> None:
    """The job has gone on without it, and its late words must not overwrite what the job has written since."""
    output = opened(small_config(), state)
    run_folder.take_over(Path("run"))
    assert not output.commit_last(state)
    assert checkpoint.committed(Path("run")) == []
    output.close()


@pytest.mark.parametrize(("taken", "lines"), [(True, 0), (False, 1)])
def test_a_process_whose_folder_was_taken_over_adds_nothing_to_the_ledger(
    taken: bool, lines: int, state: TrainState
) -> None:
    """Its successor writes the steps under way; a process that still has the folder does so when it closes it."""
    output = opened(small_config(ledger=True), state)
    output.journal.took(Entry(0, (1, 7), 1, (0, 140), 1))
    if taken:
        run_folder.take_over(Path("run"))
    output.close()
    path = Path("run/ledger.jsonl")
    assert len(path.read_text().splitlines() if path.exists() else []) == lines


def test_a_full_disk_costs_the_summary_and_not_the_training(
    state: TrainState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What could not be written is named, once each."""
    output = opened(small_config(), state)
    with full_disk(monkeypatch):
        output.write_summary({"top1": 1.0})
        output.write_surroundings(["node1"], None)
    output.close()
    printed = capsys.readouterr().out
    assert printed.count("cannot write run/summary.json: No space left on device") == 1
    assert printed.count("cannot write environment.json: No space left on device") == 1
    assert not Path("run/summary.json").exists()


def test_the_summary_is_what_was_given(state: TrainState) -> None:
    """As JSON, for programs."""
    output = opened(small_config(), state)
    output.write_summary({"top1": 0.5, "why": "done"})
    output.close()
    assert json.loads(Path("run/summary.json").read_text()) == {"top1": 0.5, "why": "done"}


@pytest.mark.parametrize(("environment", "bar"), [({}, True), ({"OMPI_COMM_WORLD_SIZE": "1"}, False)])
def test_a_rank_of_mpirun_prints_lines(environment: dict[str, str], bar: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI gives a rank a terminal even where its own output goes to a file, which a bar would fill."""
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert shows_bar(Config(), Place()) == bar


def test_what_the_journal_begins_to_write_is_no_leftover(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads write files of their own from the first moment on; those of killed processes are gone by then."""

    class Begins(SilentJournal):
        def __init__(self, folder: Path, *_: object, **__: object) -> None:
            assert not (folder / "theirs.partial").exists()
            (folder / "mine.partial").write_text("under way")

    monkeypatch.setattr("hvd_train.output.RunJournal", Begins)
    opened(small_config(), state).close()
    Path("run/theirs.partial").write_text("of a killed process")
    opened(small_config(), state).close()
    assert Path("run/mine.partial").exists()

"""The run folder on rank 0 where it is at a URL: each machine works in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train import checkpoint, last_commit, remote_url
from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.last_commit import commit_for_all
from hvd_train.output import Output
from hvd_train.run_files.remote import Remote
from hvd_train.state import Progress, TrainState
from hvd_train.world.world import Place
from tests.support.runs import small_config
from tests.unit.story.test_output import first_cut


def remote_config() -> Config:
    """A run at a URL."""
    return small_config().replace(output_dir=Path(f"file://{Path.cwd()}/remote"))


def machine(name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have this process be on another machine; its working folder of the run."""
    monkeypatch.setenv(remote_url.FOLDER, str(Path(name).resolve()))
    return remote_url.working_folder(remote_config().run.output_dir or Path())


def trained(state: TrainState, step: int, *, run_dir: Path | None = None, from_disk: bool = True) -> Path:
    """Take the run folder, be at a step, commit it and leave; the working folder."""
    output = Output(remote_config())
    claim = output.claim(state, run_dir, first_cut, from_disk=from_disk)
    state.progress = Progress(0, 0, step)
    output.open(claim, state, Place())
    output.journal.event("note", f"at step {step}")
    assert output.commit_last(state)
    assert output.copied().result(60)
    path = output.path
    output.close()
    assert path is not None
    return path


def copied_step() -> int:
    """The step of the newest commit at the URL."""
    return next(Remote(str(remote_url.url_of(remote_config().run.output_dir or ""))).commits(pytest.fail)).step


def test_a_run_goes_on_on_another_machine(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the commit at the URL, which the settings have; a first machine that comes back is brought up to date."""
    first = machine("a", monkeypatch)
    assert trained(state, 3) == first
    assert f"output_dir: file://{Path.cwd()}/remote\n" in (first / "config.yaml").read_text()
    second = machine("b", monkeypatch)
    output = Output(remote_config())
    claim = output.claim(state, None, first_cut, from_disk=True)
    assert claim.loaded
    assert state.progress.step == 3
    output.close()
    claim.folder.release()
    trained(state, 5)
    assert "at step 3" in (second / "metrics.jsonl").read_text()
    machine("a", monkeypatch)
    trained(state, 7)
    assert "at step 5" in (first / "metrics.jsonl").read_text()
    assert copied_step() == 7


def test_rank_0_moves_to_another_machine(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks have the state, so no checkpoint is fetched; the records of earlier steps are, and it copies on."""
    machine("a", monkeypatch)
    trained(state, 3)
    second = machine("b", monkeypatch)
    trained(state, 4, run_dir=remote_config().run.output_dir, from_disk=False)
    assert [path.name for path in checkpoint.committed(second)] == ["step-0000000004.ckpt"]
    assert "at step 3" in (second / "metrics.jsonl").read_text()
    assert copied_step() == 4


def test_a_service_that_is_gone_ends_no_job_that_has_its_state(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on, and copies when the service is back; what must begin from there is one line, and leaves nothing."""
    machine("a", monkeypatch)
    trained(state, 3)
    here = machine("b", monkeypatch)

    def fails(*_: object) -> list[str]:
        raise ConnectionError("no route")

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "names", fails)
        with pytest.raises(UsageError, match=r"^--output-dir file:///.*/remote: no route; nothing was started$"):
            Output(remote_config()).claim(state, None, first_cut, from_disk=True)
        assert not here.exists()
        output = Output(remote_config())
        claim = output.claim(state, remote_config().run.output_dir, first_cut, from_disk=False)
        assert "training goes on without the files of earlier steps" in claim.notes[0]
        state.progress = Progress(0, 0, 4)
        output.open(claim, state, Place())
    assert output.commit_last(state)
    assert output.copied().result(60)
    output.close()
    assert copied_step() == 4


def test_a_place_that_cannot_be_written_is_known_before_training(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of this run stays on the machine: the next command may have other settings."""
    here = machine("a", monkeypatch)

    def fails(*_: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(Remote, "write", fails)
    with pytest.raises(UsageError, match=r"remote: Access Denied; nothing was started$"):
        Output(remote_config()).claim(state, None, first_cut, from_disk=True)
    assert not here.exists()


def test_a_survivor_on_another_machine_commits_for_all(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank 0 and the driver are gone; one whose step is there already ends in peace."""
    monkeypatch.setattr(last_commit, "_PATIENCE_AT_URL_S", 1.0)
    monkeypatch.setattr(last_commit, "_POLL_AT_URL_S", 0.1)
    machine("a", monkeypatch)
    trained(state, 3)
    for name, told in (("b", "committed in "), ("c", "committed by another rank")):
        machine(name, monkeypatch)
        state.progress = Progress(0, 0, 4)
        output = Output(remote_config())
        run_dir = remote_config().run.output_dir
        assert run_dir is not None
        assert commit_for_all(output, remote_config(), state, run_dir).startswith(told)
        output.close()
        assert copied_step() == 4
    assert not Path("c").exists()

"""How long a process waits for a run folder that another one has, and when it takes it at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import launcher
from hvd_train.output import Output
from hvd_train.state import TrainState
from hvd_train.world.world import Place
from tests.support.runs import small_config
from tests.unit.story.test_output import first_cut, opened


class Clock:
    """The time for those who wait; sleeping moves it on, and something may happen meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.sleeps = 1000.0, list[float]()
        self.meanwhile: Callable[[], None] = lambda: None
        monkeypatch.setattr("hvd_train.output.time.monotonic", lambda: self.now)
        monkeypatch.setattr("hvd_train.output.time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        self.now += seconds
        self.sleeps.append(seconds)
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock in place of that of the process."""
    return Clock(monkeypatch)


@pytest.fixture
def in_elastic_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a worker of an elastic job."""
    monkeypatch.setenv(launcher.OWNER, "job")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


@pytest.mark.usefixtures("in_elastic_job")
def test_a_worker_goes_on_as_soon_as_the_folder_is_free(
    clock: Clock, state: TrainState, capsys: pytest.CaptureFixture[str]
) -> None:
    """It looks several times a second, and tells the user once what it waits for."""
    former = opened(small_config(), state)

    def ends() -> None:
        if len(clock.sleeps) == 3:
            former.close()

    clock.meanwhile = ends
    claim = Output(small_config()).claim(state, None, first_cut, from_disk=True)
    assert claim.folder.earlier
    assert len(clock.sleeps) == 3
    assert sum(clock.sleeps) < 1
    assert capsys.readouterr().err == (
        "hvd-train: another process is training in run: waiting 45 s at most for its end\n"
    )
    claim.folder.release()


@pytest.mark.usefixtures("in_elastic_job")
def test_a_worker_whose_job_does_not_own_the_folder_gives_up_after_the_wait(clock: Clock, state: TrainState) -> None:
    """Another job trains there, and keeps its folder."""
    living = opened(small_config(), state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(launcher.OWNER, "another job")
        with pytest.raises(UsageError, match="another process is training in run"):
            Output(small_config()).claim(state, None, first_cut, from_disk=True)
    assert 45 <= sum(clock.sleeps) < 46
    assert living.commit_last(state)
    living.close()


def test_a_second_command_is_refused_at_once(
    clock: Clock, state: TrainState, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits at a prompt for a training to end."""
    living = opened(small_config(), state)
    with pytest.raises(UsageError, match="another process is training in run"):
        Output(small_config()).claim(state, None, first_cut, from_disk=True)
    assert clock.sleeps == []
    assert "waiting" not in capsys.readouterr().err
    living.close()


@pytest.mark.usefixtures("in_elastic_job")
def test_a_new_rank_0_does_not_wait_for_the_one_that_the_job_has_left_behind(clock: Clock, state: TrainState) -> None:
    """All other ranks would wait with it; the former one writes nothing from then on."""
    former = opened(small_config(), state)
    latter = Output(small_config())
    latter.open(latter.claim(state, Path("run"), first_cut, from_disk=False), state, Place())
    assert clock.sleeps == []
    assert not former.commit_last(state)
    assert latter.commit_last(state)
    former.close()
    latter.close()


def test_what_a_takeover_leaves_belongs_to_the_job(
    clock: Clock, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of the same job find the folder again by the job's name, whatever the config says about resuming."""
    monkeypatch.setenv(launcher.OWNER, "job")
    former = opened(small_config(), state)
    claim = Output(small_config()).claim(state, Path("run"), first_cut, from_disk=False)
    claim.folder.release()
    again = Output(small_config(resume="never")).claim(state, None, first_cut, from_disk=True)
    assert (again.folder.path, again.folder.earlier) == (Path("run"), True)
    assert not Path("run.old").exists()
    again.folder.release()
    former.close()

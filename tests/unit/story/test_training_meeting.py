"""What ranks that meet send to each other, and what they keep of it when the meeting breaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_train import checkpoint, transfer
from hvd_train.data.batches import Loader
from hvd_train.errors import ReplicasDiffer
from hvd_train.run_files import run_folder
from hvd_train.run_files.ledger import audit
from hvd_train.state import TrainState
from hvd_train.training import Training
from hvd_train.world.world import LocalWorld
from tests.support.elastic import Hosts, Kill, KillMeeting, run_elastic
from tests.support.fault_plays import ONE, THREE, TWO, check, events_of, play, undisturbed
from tests.support.runs import small_config, trained
from tests.unit.story.test_training_end import records


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """By which way each rank has given or taken a state."""
    ways = list[str]()
    for name in ("synchronize", "hand_over"):
        original = getattr(transfer, name)

        def noted(*rest: Any, name: str = name, original: Any = original, **named: Any) -> Any:
            ways.append(name)
            return original(*rest, **named)

        monkeypatch.setattr(transfer, name, noted)
    return ways


def test_survivors_of_one_step_send_each_other_nothing(sent: list[str]) -> None:
    """They hold the same, and a state of many gigabytes would take minutes."""
    job, folder = play([Kill(7, rank=2)], ONE, TWO, THREE, most=3)
    assert job.sizes[:2] == [3, 2]
    assert sent[:3] == ["synchronize"] * 3  # when the job began
    sent_later = sent[3:]
    assert set(sent_later) <= {"hand_over"}
    assert len(sent_later) == (3 if 3 in job.sizes[1:] else 0)  # where another one has come in time
    check(job, folder, undisturbed())


def test_a_newcomer_knows_the_folder_of_the_job_before_it_has_its_state() -> None:
    """Those who knew it may die meanwhile: it goes on from their commit, without --output-dir too."""
    config = small_config(epochs=2, output_dir=None, recipe="few", resume="never", ledger=True, commit_steps=1)
    events = [Hosts(5, (ONE, TWO)), KillMeeting(2, 0, 4)]
    job = run_elastic(lambda world: trained(world, config), dict([ONE]), events, first=1, most=2)
    assert not job.events
    (folder,) = Path("runs").iterdir()
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, 20)


def test_a_new_rank_0_that_finds_a_newcomer_apart_commits_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the folder only since this meeting, in which the job ends."""
    load = TrainState.load_values

    def load_otherwise(state: TrainState, snapshot: dict[str, Any]) -> None:
        load(state, snapshot)
        if state.progress.step:  # not in the first meeting
            state.model.get_parameter("4.bias").data += 1

    monkeypatch.setattr(TrainState, "load_values", load_otherwise)
    config = small_config()
    with pytest.raises(ReplicasDiffer, match=r"rank 1 in 4\.bias; what rank 0 holds is committed"):
        run_elastic(
            lambda world: trained(world, config), dict([ONE, TWO]), [Kill(7, rank=0)], first=2, fewest=2, most=2
        )
    (commit,) = checkpoint.committed(Path("run"))
    assert checkpoint.read(commit)["progress"]["step"] in (6, 7)


def test_a_run_is_started_once_and_only_its_worlds_change() -> None:
    """The line of its start comes before all of them."""
    _, folder = play([Hosts(5, (ONE, TWO))], ONE)
    names = [event["name"] for event in records("event", str(folder))]
    assert names.index("start") < names.index("world")
    assert names.count("start") == 1
    assert [event["previous_size"] for event in events_of(folder)] == [1]


def test_a_process_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new job that finds a worker of the one before in the folder would wait for its last steps."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    stayed: list[bool] = []
    close = Training.close

    def noted(training: Training) -> None:
        stayed.append(run_folder._has_members(Path("run")))
        close(training)
        stayed.append(run_folder._has_members(Path("run")))

    monkeypatch.setattr(Training, "close", noted)
    trained(LocalWorld(), small_config(epochs=1))
    assert stayed == [True, False]


def test_the_folder_is_free_when_a_training_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For another training in this process; without a test set there is no third loader."""
    loaders: list[Loader | None] = []
    close = Training.close

    def noted(training: Training) -> None:
        parts = training.parts
        loaders.extend((parts.train_loader, parts.val_loader, parts.test_loader))
        close(training)

    monkeypatch.setattr(Training, "close", noted)
    for resume in ("auto", "never"):
        trained(LocalWorld(), small_config(epochs=1, resume=resume))
    assert [loader is None for loader in loaders] == [False, False, True] * 2
    assert sorted(path.name for path in Path().iterdir()) == ["run", "run.old"]

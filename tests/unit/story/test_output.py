"""The run folder on rank 0: its owner, its files, and a full disk."""

from pathlib import Path

import pytest

from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.launch import workers
from hvd_train.output import Output
from hvd_train.progress.order import BatchLayout
from hvd_train.run_files.ledger import Entry, read
from hvd_train.run_files.run_folder import RunFolder
from hvd_train.state import TrainState
from hvd_train.world.world import Program
from tests.support.runs import RUN, small_config, steps_on_disk


def claim(config: Config, state: TrainState, output: Output | None = None) -> RunFolder:
    return (output or Output(config, Program())).claim(
        state, None, BatchLayout(20, 4), 60, from_disk=True
    )


def opened(config: Config, state: TrainState) -> Output:
    output = Output(config, Program())
    output.open(claim(config, state, output), state)
    return output


class Clock:
    """A clock whose sleeps take ten seconds, during which something may happen."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps = 0
        self.meanwhile = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += 10.0
        self.sleeps += 1
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of an elastic job."""
    clock = Clock()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setattr("hvd_train.output.time.monotonic", lambda: clock.now)
    monkeypatch.setattr("hvd_train.output.time.sleep", clock.sleep)
    return clock


def test_an_elastic_job_waits_for_the_end_of_another_process(
    clock: Clock, state: TrainState
) -> None:
    """For 45 s; it continues once the folder is free, and never takes another job's folder."""
    living = opened(small_config(), state)
    with pytest.raises(UsageError, match="another process is training in run"):
        claim(small_config(), state)
    assert clock.sleeps == 5
    assert living.commit_last(state).result()
    clock.meanwhile = living.close
    found = claim(small_config(), state)
    assert (found.earlier, clock.sleeps) == (True, 6)
    found.release()


@pytest.mark.parametrize(
    ("resume", "output_dir"), [("auto", None), ("never", "mine"), ("a/file.ckpt", None)]
)
def test_later_workers_of_a_job_continue_in_its_folder(
    resume: str,
    output_dir: str | None,
    clock: Clock,
    state: TrainState,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the user typed. They wait for a former worker, and then take the folder over."""
    former = opened(small_config(output_dir=output_dir, recipe="few"), state)
    assert former.commit_last(state, verified=True).result()
    config = small_config(output_dir=output_dir, recipe="few", resume=resume)
    monkeypatch.setenv(workers.RUN_DIR, str(former.path))
    found = claim(config, state)
    assert (found.path, found.earlier, found.notes, clock.sleeps) == (former.path, True, (), 5)
    assert not former.commit_last(state, verified=True).result()
    former.close()


@pytest.mark.parametrize("output_dir", ["mine", None])
@pytest.mark.parametrize("job", ["plain", "elastic"])
def test_a_run_whose_checkpoints_are_damaged_does_not_begin_again(
    job: str, output_dir: str | None, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays as it is, and an error names the file; `--resume never` begins again."""
    config = small_config(output_dir=output_dir, recipe="few", epochs=2)
    earlier = opened(config, state)
    assert earlier.commit_last(state).result()
    folder = earlier.path
    earlier.write("summary.json", {})
    earlier.close()
    if output_dir is None:
        # a run that has one is finished, and not continued by itself
        (folder / "summary.json").unlink()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[:-1])
    if job == "elastic":
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
        monkeypatch.setenv(workers.RUN_DIR, str(folder))

    def files():
        return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}

    before = files()
    changed = config.replace(epochs=3) if output_dir else config
    with pytest.raises(UsageError, match=r"no checkpoint .*0007\.ckpt is .*--resume never"):
        claim(changed, state)
    assert files() == before
    checkpoint.write_bytes(whole)
    continued = claim(changed, state)
    assert (continued.path, continued.earlier) == (folder, True)
    continued.release()
    monkeypatch.delenv(workers.RUN_DIR, raising=False)
    checkpoint.write_bytes(b"")
    again = claim(config.replace(resume="never"), state)
    assert not again.earlier
    again.release()


def test_a_rank_that_is_no_longer_rank_0_releases_the_folder(state: TrainState) -> None:
    """The next rank 0 finds all earlier records; later ones of this rank are not written."""
    former = opened(small_config(ledger=True), state)
    state.recent = [Entry(0, (1, 7), 2, (0, 140), 1)]
    former.journal.catch_up(state.recent, None, None)
    assert former.store.commit(state, verified=True)
    former.open(None, state)
    assert former.path is None
    assert steps_on_disk() == [7]
    assert [entry.steps for entry in read(RUN / "ledger.jsonl")] == [(1, 7)]
    former.journal.took(Entry(0, (1, 8), 2, (0, 160), 1))
    assert not former.commit_last(state, verified=True).result()
    following = opened(small_config(ledger=True), state)
    following.journal.catch_up(state.recent, None, None)
    following.close()
    former.close()
    assert [entry.steps for entry in read(RUN / "ledger.jsonl")] == [(1, 7)]

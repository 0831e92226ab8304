"""Values of a training for other programs (`--log-to`)."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_train.errors import UsageError
from hvd_train.run_files import trackers
from hvd_train.world.world import LocalWorld
from tests.support.runs import small_config, trained
from tests.support.worlds import StoppingWorld


class Wandb:
    """Stands for the library: takes runs by their identity, and fails after `most` values."""

    __spec__ = SimpleNamespace()  # it is found

    def __init__(self) -> None:
        self.runs = {}
        self.most = 1000
        self.answers = threading.Event()
        self.answers.set()

    # its name
    def init(self, *, id: str | None, config: dict[str, Any], **_: Any) -> Any:  # noqa: A002
        self.answers.wait()
        name = id or f"run {len(self.runs)}"
        self.settings = config
        lines = self.runs.setdefault(name, [])

        def finish():
            if len(lines) == self.most:
                raise ConnectionError("no route\nto the server")

        def log(values):
            finish()
            lines.append(values)

        return SimpleNamespace(id=name, log=log, define_metric=lambda *_, **__: None, finish=finish)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    library = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", library)
    return library


def test_a_run_that_resumes_is_one_run_at_the_tracker(wandb: Wandb) -> None:
    config = small_config(
        output_dir=Path("run"), log_to="wandb", log_steps=2, epochs=1, commit_steps=5
    )
    trained(StoppingWorld(after=6), config)
    trained(LocalWorld(), config)
    (lines,) = wandb.runs.values()
    assert [values["step"] for values in lines if "train/loss" in values] == [2, 4, 6, 8, 10]
    assert wandb.settings["log_to"] == "wandb"


@pytest.mark.parametrize("fails", ["a value", "the end", "the start"])
def test_a_tracker_that_fails_does_not_end_the_training(
    fails: str, wandb: Wandb, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may even exit."""
    wandb.most = 2
    why = "ConnectionError: no route"
    if fails == "the start":
        monkeypatch.setattr(wandb, "init", lambda **_: sys.exit("not logged in"))
        why = "SystemExit: not logged in"
    config = small_config(log_to="wandb", log_steps=1 if fails == "a value" else 10, epochs=1)
    result, _ = trained(LocalWorld(), config)
    assert result.finished
    line = f"--log-to wandb: {why}; nothing more goes there"
    assert capsys.readouterr().out.count(line) == 1


@pytest.mark.parametrize(
    ("most", "line"), [(10_000, "records are not sent"), (2, "and 2 records wait")]
)
def test_training_does_not_wait_for_a_server_that_is_down(
    most: int,
    line: str,
    wandb: Wandb,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wandb.answers.clear()
    monkeypatch.setattr(trackers, "_LAST_SECONDS", 0.1)
    monkeypatch.setattr(trackers, "_MOST_WAITING", most)
    result, _ = trained(LocalWorld(), small_config(log_to="wandb", log_steps=10, epochs=1))
    assert result.finished
    output = capsys.readouterr().out
    assert output.count("--log-to wandb: no answer") == 1
    assert f"{line}; nothing more goes there" in output
    wandb.answers.set()


def test_a_tracker_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--log-to mlflow: mlflow is not installed: pip install"):
        trackers.check(["tensorboard", "mlflow"])

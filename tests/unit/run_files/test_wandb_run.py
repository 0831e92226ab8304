"""A run at Weights & Biases that is offline, read back from wandb's own files. Each part of it is a process."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.errors import UsageError
from hvd_train.run_files import wandb_run
from tests.support import wandb_files

PART = """
import os, sys, time
from pathlib import Path
from hvd_train.run_files.journal import RunJournal
from hvd_train.run_files.records import Ending
from tests.unit.run_files.test_journal import epoch_record, step_record

resumed, epochs_done, last, how = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
settings = {"seed": 0, "run": {"tuned": None}}
journal = RunJournal(Path("run"), resumed, epochs_done, live=False, log_to=["wandb"], settings=settings)
for step in range(resumed + 1, last + 1):
    journal.step(step_record(step, loss=float("nan") if step == 2 and how == "stopped" else 0.5))
    if step == 3:
        journal.epoch(epoch_record(1, step))
if how == "killed":
    time.sleep(float(sys.argv[5]))
    os.kill(os.getpid(), 9)
journal.end(Ending(how, {"best/top1": 0.75} if how == "finished" else {}))
journal.close()
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID", "WANDB_API_KEY", "WANDB_SILENT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    Path("run").mkdir()


def part(*arguments: str | int) -> str:
    """Train a part of a run: after which step, with how many epochs done, to which step, and its end."""
    root = str(Path(wandb_run.__file__).parents[2])
    line = [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n{PART}", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200)
    assert done.returncode == (-9 if "killed" in arguments else 0), done.stderr
    assert "wandb: " not in done.stderr, done.stderr
    return done.stdout


def steps_of(name: str) -> list[int]:
    """Return the steps that have a number of this name."""
    return [row["_step"] for row in wandb_files.history(Path("run")) if name in row]


def test_a_run_that_goes_on_is_one_run() -> None:
    """Steps that are taken again do not come twice; config, names, summary and state are there; wandb says one line."""
    printed = part(0, 0, 4, "stopped")
    (line,) = [line for line in printed.splitlines() if "wandb is offline" in line]
    assert "type wandb sync run/wandb/offline-run-" in line
    part(2, 0, 6, "finished")
    assert steps_of("train/loss") == [1, 2, 3, 4, 5, 6]
    assert steps_of("val/top1") == [3]
    assert math.isnan(wandb_files.history(Path("run"))[1]["train/loss"])
    assert wandb_files.summary(Path("run"))["best/top1"] == 0.75
    assert wandb_files.exit_codes(Path("run")) == [75, 0]
    found = wandb_files.settings(Path("run"))
    assert (found["name"], found["project"]) == ("run", "hvd_train")
    assert found["config"]["run"] == {"tuned": None}
    assert {file.stem for file in wandb_files.files_of(Path("run"))} == {f"run-{found['id']}"}


@pytest.mark.slow
@pytest.mark.parametrize(("last", "wait_s"), [(4, 0.0), (300, 20.0)])
def test_what_is_lost_by_a_kill_comes_from_the_records(last: int, wait_s: float) -> None:
    """Whether it was killed before the run began, or with rows that wandb had not written yet: each step comes once."""
    part(0, 0, last, "killed", wait_s)
    part(last - 1, 1, last + 2, "finished")
    assert steps_of("train/loss") == list(range(1, last + 3))
    assert steps_of("val/top1") == [3]


def test_nobody_being_logged_in_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts; with a key, or offline, it is none. No service is asked."""
    settings = wandb_run._settings()
    monkeypatch.setenv("NETRC", str(Path("netrc").resolve()))
    monkeypatch.setattr(settings, "mode", "offline")
    wandb_run.check_login()
    monkeypatch.setattr(settings, "mode", "online")
    with pytest.raises(UsageError, match="nobody is logged in: type wandb login, or set WANDB_MODE=offline"):
        wandb_run.check_login()
    host = settings.base_url.split("//")[1].split("/")[0]
    Path("netrc").write_text(f"machine {host} login user password {'a' * 40}\n")
    wandb_run.check_login()


@pytest.mark.parametrize(
    "content", [b"", b":W&B", b"\xff" * 100_000, b":W&B\x00\x00\x00" + b"\x01\x02\x03\x04\x05\x00\x01abcde"]
)
def test_a_file_that_is_none_of_wandb_has_no_steps(content: bytes) -> None:
    """Anybody may have put it there."""
    Path("x.wandb").write_bytes(content)
    assert wandb_run._last_step(Path("x.wandb")) == -1

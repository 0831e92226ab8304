"""One training of `bench scaling` as a job."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from hvd_train import recipes
from hvd_train.bench import scaling_job
from hvd_train.bench.scaling_job import Size


def size() -> Size:
    return Size(2, recipes.digits(), Path("np-2"))


def line(program: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys, time\nfrom pathlib import Path\n{program}"]


def test_the_command_of_a_size() -> None:
    """horovodrun starts as many ranks as the size has workers, each with the size's own settings."""
    command = scaling_job.command(size(), None, "gloo")
    assert command[command.index("-np") + 1] == "2"
    assert command[-3:] == ["train", "--config", str(Path("np-2.yaml").resolve())]
    assert str(size()) == "2 workers"


def test_a_finished_training_has_not_failed() -> None:
    """Its settings stand in a file beside its folder, and what it prints in another one."""
    program = "Path('np-2').mkdir()\nPath('np-2/summary.json').write_text('{}')\nprint('all is well')"
    assert scaling_job.train(line(program), size()) is None
    assert size().trained
    assert "digits" in Path("np-2.yaml").read_text()
    assert Path("np-2.log").read_text() == "all is well\n"


def test_a_training_that_was_stopped_is_not_done() -> None:
    """A time limit leaves a summary that says so."""
    Path("np-2").mkdir()
    Path("np-2/summary.json").write_text('{"finished": false}')
    assert not size().trained


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('[1,0]<stderr>:hvd-train: no such data'); sys.exit(2)", "no such data"),
        ("print('stopped by SIGTERM at step 3'); sys.exit(3)", "stopped by SIGTERM at step 3"),
        ("raise ValueError('broken')", "ValueError: broken"),
        ("sys.exit(5)", "exit code 5"),
        ("pass", "exit code 0"),
    ],
)
def test_why_a_training_has_failed(program: str, reason: str) -> None:
    """Its own last word, or else its exit code; of what it has printed now, not of what an earlier start printed."""
    Path("np-2.log").write_text("hvd-train: an error of yesterday\n")
    assert scaling_job.train(line(program), size()) == f"{reason} (all it printed: np-2.log)"


def test_a_signal_reaches_the_training() -> None:
    """SIGTERM is passed on once; the training ends in its own way, and the bench stops after it."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: (print('committed', flush=True), sys.exit(0)))"
    program = f"{handler}\nos.kill({os.getpid()}, signal.SIGTERM)\ntime.sleep(60)"
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        scaling_job.train(line(program), size())
    assert Path("np-2.log").read_text() == "committed\n"
    assert signal.getsignal(signal.SIGTERM) is before

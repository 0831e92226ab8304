"""A rank that stands still tells where it is, once, before Horovod's limit; one that goes on says nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvd_train.launch import stand_still
from tests.support.launching import wait_for


@pytest.mark.parametrize(
    ("value", "limit_s"), [("600", 480.0), ("100", 80.0), ("0", 480.0), ("", 480.0), ("never", 480.0)]
)
def test_before_the_limit_of_horovod(value: str, limit_s: float) -> None:
    """Where there is no limit, what stands still for as long as by default is told all the same."""
    assert stand_still.limit_s({stand_still.STALL: value}) == limit_s


@pytest.mark.parametrize("goes_on", [False, True])
def test_who_stands_still_tells_it_once(goes_on: bool, tmp_path: Path) -> None:
    """With the step, the wait and the stacks of its threads; each note of a phase is a sign of life."""
    program = tmp_path / "mine.py"
    program.write_text(
        "import time\n"
        "from hvd_train.launch import stand_still\n"
        "from hvd_train.progress.whereabouts import here\n"
        "here.step(812)\n"
        "stand_still.watch(2, None, {stand_still.STALL: '0.5'})\n"
        "with here.waiting('the sum of gradients'):\n"
        "    for _ in range(20):\n"
        "        time.sleep(0.075)\n"
        f"        {goes_on} and here.at('data')\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    told = done.stderr.count("has waited for other ranks in the sum of gradients for")
    assert told == (0 if goes_on else 1), done.stderr
    assert ("(step 812); its stacks follow" in done.stderr) is not goes_on
    assert (f'{program}", line 8' in done.stderr) is not goes_on


def test_nobody_watches_when_the_training_is_over() -> None:
    """A program may go on for hours after it, or train again."""
    for _ in range(2):
        stand_still.watch(0, None, {})
        assert [thread for thread in threading.enumerate() if thread.name == "stand still"]
        stand_still.end()
        wait_for("the watch to end", lambda: not [t for t in threading.enumerate() if t.name == "stand still"])

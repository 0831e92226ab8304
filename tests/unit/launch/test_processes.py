"""Finding processes by the environment that they were started with."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from hvd_train.launch import processes

SLEEPS = "import signal; print('up', flush=True); signal.pause()"


def test_a_process_and_its_children_are_found_by_their_variables() -> None:
    """Also in a session of its own; all the variables must have these values, and the current process never counts."""
    environment = {**os.environ, "HVD_TRAIN_TEST": "1", "HVD_TRAIN_TEST_JOB": "a"}
    command = ["sh", "-c", f'{sys.executable} -c "{SLEEPS}" & wait']
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "up\n"
        found = processes.started_with({"HVD_TRAIN_TEST": "1", "HVD_TRAIN_TEST_JOB": "a"})
        others = processes.started_with({"HVD_TRAIN_TEST": "1", "HVD_TRAIN_TEST_JOB": "b"})
        for process in found:
            process.kill()
    assert len(found) == 2
    assert shell.pid in {process.pid for process in found}
    assert others == []
    at_its_start = psutil.Process().environ()
    assert os.getpid() not in {process.pid for process in processes.started_with(at_its_start)}


def test_a_process_is_as_old_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from its start, imports included, whatever happens to the time of day."""
    code = "import time; from hvd_train.launch import processes; time.sleep(0.5); print(processes.age_s())"
    begun = time.monotonic()
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0.5 <= float(printed) <= time.monotonic() - begun + 0.01  # /proc counts in hundredths of a second
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert processes.age_s() > 0

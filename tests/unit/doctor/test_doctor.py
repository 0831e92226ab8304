"""Programs of the doctor, and their answers."""

import os
from pathlib import Path

import pytest

from hvd_train.doctor import machine, trial

LOG = "[2]<stderr>:[E operations.cc] Horovod could not be initialized: Connect timeout [10.0.0.2]:9"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo; echo out; echo err", "out"),
        ("kill -ILL $$", "killed by SIGILL"),
        ("", "exit code 1, without output"),
        (f"echo '{LOG}'; echo ValueError: x", "rank 2: Connect timeout [10.0.0.2]:9"),
    ],
)
def test_each_end_of_a_program_has_a_line(script: str, says: str) -> None:
    assert machine.run(["sh", "-c", f"{script}\nexit 1"], os.environ)["error"] == says


def test_a_program_that_does_not_end_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LIMIT_S", -19.9)
    assert machine.run(["sleep", "60"], os.environ)["error"] == "no end in 0 s"


def test_the_last_answer_of_a_program_counts() -> None:
    """It says what was being imported if that crashed."""
    Path("broken").mkdir()
    Path("broken/torch.py").write_text("raise ImportError('no libcudart')")
    found = machine.run([*machine.TRIAL, "probe"], {**os.environ, "PYTHONPATH": "broken"})
    assert (found["importing"], found["error"]) == ("torch", "ImportError: no libcudart")
    answers = f"echo noise; echo '[1,0]<stdout>:{trial.ANSWER}{{\"size\": 2}}'; echo noise"
    found = machine.run(["sh", "-c", answers], os.environ)
    assert (found["size"], "error" in found) == (2, False)

"""Programs of the doctor, and their answers."""

import os
import sys
from pathlib import Path

import pytest

from hvd_train.doctor import machine, trial


def error(*command: str) -> str:
    found: str = machine.run(command, os.environ)["error"]
    return found


def test_each_end_of_a_program_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last answer counts: it says what was being imported if that crashed."""
    assert (
        error(sys.executable, "-c", "import sys; print('\\nout', flush=True); exit('err')") == "out"
    )
    assert error("sh", "-c", "kill -ILL $$") == "killed by SIGILL"
    assert error("false") == "exit code 1, without output"
    Path("broken").mkdir()
    Path("broken/torch.py").write_text("raise ImportError('no libcudart')")
    found = machine.run([*machine.TRIAL, "probe"], {**os.environ, "PYTHONPATH": "broken"})
    assert (found["importing"], found["error"]) == ("torch", "ImportError: no libcudart")
    answers = f"echo noise; echo '[1,0]<stdout>:{trial.ANSWER}{{\"size\": 2}}'; echo noise"
    found = machine.run(["sh", "-c", answers], os.environ)
    assert (found["size"], "error" in found) == (2, False)
    log = (
        "[2]<stderr>:[E operations.cc] Horovod could not be initialized: Connect "
        "timeout [10.0.0.2]:9"
    )
    assert (
        error("sh", "-c", f"echo '{log}'; echo ValueError: x; exit 1")
        == "rank 2: Connect timeout [10.0.0.2]:9"
    )
    monkeypatch.setattr(trial, "LIMIT_S", -19.9)
    assert error("sleep", "60") == "no end in 0 s"

"""The real `hvd-train doctor` on this machine, and with faults of Horovod."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import hvd_train

pytestmark = pytest.mark.integration

DOCTOR = [sys.executable, "-c", "from hvd_train.cli import main; main()", "doctor"]


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Return this environment without its programs on the PATH, and with these folders for imports."""
    own = str(Path(sys.executable).parent)
    path = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder != own]
    imports = [str(folder) for folder in (*folders, Path(hvd_train.__file__).parent.parent)]
    return {**os.environ, "PATH": os.pathsep.join(path), "PYTHONPATH": os.pathsep.join(imports), **variables}


def with_horovod(folder: Path, text: str) -> dict[str, str]:
    """Return an environment in which this text is the package `horovod`."""
    (folder / "horovod").mkdir()
    (folder / "horovod" / "__init__.py").write_text(text)
    return environment(folder)


def examine(env: dict[str, str], *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [*DOCTOR, "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=env)
    assert not done.stderr, done.stderr
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="there is no Horovod here")
def test_this_machine_adds_over_two_ranks_by_every_launcher() -> None:
    """No environment is activated."""
    code, findings = examine(environment())
    assert code == 0, findings
    for name in ("python", "torch", "horovod loads", "built in", "MPI", "horovodrun --gloo"):
        assert findings[name]["verdict"] == "ok", findings[name]
    if "MPI" in findings["built in"]["what"] and "none" not in findings["MPI"]["what"]:
        for name in ("horovodrun --mpi", "mpirun"):
            assert "the sum is right" in findings[name]["what"], findings[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('raise ImportError("mpi_lib_v2.so: undefined symbol: _ZN3c104cuda")', "undefined symbol"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ],
)
def test_a_horovod_that_does_not_load_is_a_line_that_says_rebuild(text: str, what: str, tmp_path: Path) -> None:
    """Horovod was built for another torch, or it crashes."""
    code, findings = examine(with_horovod(tmp_path, text))
    assert code == 1
    assert findings["horovod loads"]["verdict"] == "broken"
    assert what in findings["horovod loads"]["what"]
    assert "packaging/build_horovod.py" in findings["horovod loads"]["todo"]
    assert not any("allreduce" in name or "horovodrun" in name for name in findings), "an allreduce was tried"


def test_an_interrupted_doctor_leaves_nothing(tmp_path: Path) -> None:
    """A signal while a child process hangs ends both and removes the temporary folder."""
    pid_pipe, temporary = tmp_path / "pid", tmp_path / "temporary"
    os.mkfifo(pid_pipe)
    temporary.mkdir()
    write = f"pathlib.Path({str(pid_pipe)!r}).write_text(str(os.getpid()))"
    env = with_horovod(tmp_path, f"import os, pathlib, signal\n{write}\nsignal.pause()\n")
    doctor = subprocess.Popen(
        DOCTOR, env={**env, "TMPDIR": str(temporary)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    child = psutil.Process(int(pid_pipe.read_text()))
    doctor.send_signal(signal.SIGTERM)
    output, _ = doctor.communicate(timeout=150)
    assert doctor.returncode == 143
    assert b"Traceback" not in output
    assert not child.is_running()
    assert not list(temporary.iterdir())

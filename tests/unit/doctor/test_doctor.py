"""Child processes and agents of the doctor, and their answers."""

import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from hvd_train.doctor import children, cluster
from hvd_train.doctor.children import Outcome, answer
from hvd_train.launch.hosts import Host
from tests.support.launching import wait_for

# Becomes a process that ignores SIGTERM.
STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "w") as pipe:
    pipe.write(str(os.getpid()))
signal.pause()
"""


def run(*command: str, timeout_s: float = 60.0) -> Outcome:
    return children.run(command, os.environ, timeout_s)


def test_each_end_of_a_child_is_an_answer() -> None:
    outcome = run(sys.executable, "-c", "import sys; print('out', flush=True); print('err', file=sys.stderr); exit(3)")
    assert (outcome.code, outcome.output.split()) == (3, ["out", "err"])
    outcome = run("/nowhere/horovodrun")
    assert outcome.code == 127 and "/nowhere/horovodrun" in answer(outcome)["error"]
    outcome = run(sys.executable, "-c", "import signal; signal.pause()", timeout_s=0.0)
    assert (outcome.code, answer(outcome)["error"]) == (None, "no end in 0 s")
    program = children.TORCH.replace("import torch\n", "import no_such_package\n", 1)
    found = answer(run(sys.executable, "-c", program))
    assert found == {"error": "ModuleNotFoundError: No module named 'no_such_package'"}


def test_a_program_ends_with_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the doctor only; SIGKILL ends a program that ignores SIGTERM."""
    monkeypatch.setattr(children, "_GRACE_S", 0.2)
    pipe, found, wait = tmp_path / "pid", list[psutil.Process](), children.Popen.wait
    os.mkfifo(pipe)

    def interrupted(process: "children.Popen[bytes]", timeout_s: float) -> int:
        if not found:
            found.append(psutil.Process(int(pipe.read_text())))  # waits until the program is there
            raise KeyboardInterrupt
        return wait(process, timeout_s)

    monkeypatch.setattr(children.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(sys.executable, "-c", STUBBORN, str(pipe))
    # It is killed by now, but the kernel may not have removed it.
    wait_for("the end", lambda: not found[0].is_running() or found[0].status() == psutil.STATUS_ZOMBIE)


def test_a_cluster_of_one_host_is_examined() -> None:
    assert cluster.is_here(socket.gethostname())
    assert not cluster.is_here("h1.invalid")
    findings = cluster.examine([Host("localhost", 1)], quick=True)
    found = {finding.name: finding.verdict for finding in findings}
    assert found["localhost"] == found["python"] == found["names"] == "ok"
    assert "connections" not in found


def test_an_agent_ends_with_its_block() -> None:
    """It tries connections; a killed agent is an error."""
    before = set(psutil.Process().children())  # other tests may share processes
    with cluster.Agent("localhost", []) as one:
        port = one.answer(60.0)["port"]
        assert one.reach([("127.0.0.1", port), ("127.0.0.1", 1)], 60.0) == {"failures": [None, "Connection refused"]}
        (process,) = set(psutil.Process().children()) - before
        process.send_signal(signal.SIGKILL)
        assert one.reach([], 60.0) == {"error": "no answer; exit code -9"}
    assert set(psutil.Process().children()) <= before

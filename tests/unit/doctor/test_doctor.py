"""Programs and agents of the doctor, and their answers."""

import os
import signal
import socket
import sys

import psutil
import pytest

from hvd_train.doctor import cluster, machine
from hvd_train.doctor.machine import Outcome, answer
from hvd_train.launch import ssh
from hvd_train.launch.hosts import Host


def run(*command: str) -> Outcome:
    return machine.run(command, os.environ)


def test_each_end_of_a_program_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(sys.executable, "-c", "import sys; print('out', flush=True); print('err', file=sys.stderr); exit(3)")
    assert (outcome.code, outcome.output.split()) == (3, ["out", "err"])
    assert answer(outcome) == {"error": "out"}
    assert answer(Outcome(-signal.SIGILL, "")) == {"error": "killed by SIGILL"}
    assert answer(Outcome(1, "")) == {"error": "exit code 1, without output"}
    program = machine.PROBE.replace("import torch\n", "import no_such_package\n", 1)
    error = "ModuleNotFoundError: No module named 'no_such_package'"
    assert answer(run(sys.executable, "-c", program)) == {"importing": "torch", "error": error}
    monkeypatch.setattr(machine, "_LIMIT_S", -19.9)
    outcome = run(sys.executable, "-c", "import signal; signal.pause()")
    assert (outcome.code, answer(outcome)["error"]) == (124, "no end in 0 s")


def test_a_cluster_of_one_host_is_examined() -> None:
    assert ssh.is_here(socket.gethostname())
    assert not ssh.is_here("h1.invalid")
    findings = cluster.examine([Host("localhost", 1)], quick=True)
    found = {finding.name: finding.verdict for finding in findings}
    assert found["localhost"] == found["python"] == "ok"
    assert "connections" not in found


def test_an_agent_ends_with_its_block() -> None:
    """It tries connections; a killed agent is an error."""
    before = set(psutil.Process().children(recursive=True))  # other tests may share processes
    with cluster.start("localhost") as one:
        port = cluster.answer(one)["port"]
        expected = {"failures": [None, "127.0.0.1: Connection refused"]}
        assert cluster.reach(one, [("127.0.0.1", port), ("127.0.0.1", 1)]) == expected
        (process,) = psutil.Process(one.pid).children()
        process.kill()
        assert cluster.reach(one, []) == {"error": "no answer; exit code -9"}
    assert set(psutil.Process().children(recursive=True)) <= before

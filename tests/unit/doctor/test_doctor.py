"""Programs and agents of the doctor, and their answers."""

import os
import socket
import sys

import psutil
import pytest

from hvd_train.doctor import agent, cluster, machine
from hvd_train.doctor.machine import Finding
from hvd_train.launch import ssh
from hvd_train.launch.hosts import Host


def error(*command: str) -> str:
    found: str = machine.run(command, os.environ)["error"]
    return found


def test_each_end_of_a_program_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last answer counts: it says what was being imported if that crashed."""
    assert error(sys.executable, "-c", "import sys; print('\\nout', flush=True); exit('err')") == "out"
    assert error("sh", "-c", "kill -ILL $$") == "killed by SIGILL"
    assert error("false") == "exit code 1, without output"
    program = machine.PROBE.replace("import torch\n", "import no_such_package\n", 1)
    found = machine.run([sys.executable, "-c", program], os.environ)
    assert found["importing"] == "torch"
    assert found["error"] == "ModuleNotFoundError: No module named 'no_such_package'"
    answers = f"echo noise; echo '[1,0]<stdout>:{agent.ANSWER}{{\"size\": 2}}'; echo noise"
    found = machine.run(["sh", "-c", answers], os.environ)
    assert (found["size"], "error" in found) == (2, False)
    monkeypatch.setattr(machine, "_LIMIT_S", -19.9)
    assert error("sleep", "60") == "no end in 0 s"


def test_a_cluster_of_one_host_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "run_trial", lambda name, *_: Finding(name, "ok", "the sum is right"))
    assert ssh.is_here(socket.gethostname())
    assert not ssh.is_here("h1.invalid")
    findings = cluster.examine([Host("localhost", 1)])
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

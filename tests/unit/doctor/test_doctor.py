"""How the doctor finds Horovod, starts child processes, and examines this machine as a cluster of one host."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest

from hvd_train.doctor import agent, children, cluster, doctor, questions
from hvd_train.doctor.children import Outcome
from hvd_train.doctor.horovod_findings import Installed
from hvd_train.doctor.questions import ANSWER, answer, first_error
from hvd_train.launch.hosts import Host
from tests.support.facts import BUILD, installed
from tests.support.launching import wait_for

# Starts a process in a session of its own that no polite signal ends, and waits as a launcher does.
LAUNCHER = """
import subprocess, sys, signal
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], start_new_session=True)
signal.pause()
"""
STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "w") as pipe:
    pipe.write(str(os.getpid()))
signal.pause()
"""


def test_a_horovod_built_for_the_machines_mpi_gets_that_mpirun() -> None:
    """Otherwise the programs of the environment come first, also when it is not activated."""
    environ = {"PATH": "/usr/bin"}
    assert doctor.search_path(None, environ).endswith(":/usr/bin")
    assert doctor.search_path(installed(), environ).endswith(":/usr/bin")
    machines = installed({**BUILD, "mpi": "Open MPI 5.0.7 (/usr/bin/mpicxx)"})
    assert doctor.search_path(machines, environ).startswith("/usr/bin:")


def test_horovod_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder, version, build record and torch are known even if it cannot be imported; an empty folder is none."""
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    package = tmp_path / "horovod"
    package.mkdir()
    with monkeypatch.context() as only:
        only.setattr(sys, "path", [str(tmp_path)])
        assert doctor.find_horovod() is None
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor.find_horovod() == Installed(package, "of unknown version", None, "")
    (tmp_path / "horovod-0.28.1.dist-info").mkdir()
    (tmp_path / "horovod-0.28.1.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    (package / "metadata.json").write_text('{"pytorch": "2.0.1"}')
    assert doctor.find_horovod() == Installed(package, "0.28.1", None, "2.0.1")
    (package / doctor.BUILD_FILE).write_text(json.dumps(BUILD))
    assert doctor.find_horovod() == Installed(package, "0.28.1", BUILD, "2.15.0+cu132")


def run(*command: str, timeout_s: float = 60.0) -> Outcome:
    with children.children(os.environ) as group:
        return group.start([*command], timeout_s).outcome()


def test_however_a_child_ends_there_is_an_answer() -> None:
    """An exit code with all output, a program that does not exist, a hang, and a package that is missing."""
    outcome = run(sys.executable, "-c", "import sys; print('out', flush=True); print('err', file=sys.stderr); exit(3)")
    assert (outcome.code, outcome.output.split()) == (3, ["out", "err"])
    outcome = run("/nowhere/horovodrun")
    assert outcome.code == 127
    assert "/nowhere/horovodrun" in answer(outcome)["error"]
    outcome = run(sys.executable, "-c", "import signal; signal.pause()", timeout_s=0.0)
    assert outcome.code is None
    assert answer(outcome)["error"] == "no end in 0 s"
    program = questions.MPI4PY.replace("import mpi4py", "import no_such_package")
    found = answer(run(sys.executable, "-c", program))
    assert found == {"error": "ModuleNotFoundError: No module named 'no_such_package'"}


@pytest.mark.parametrize("ends", [False, True], ids=["Ctrl-C", "a child that has ended"])
def test_no_process_outlives_the_doctor(ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers in sessions of their own end as well, even if they ignore SIGTERM, and leave no folder."""
    monkeypatch.setattr(children, "_GRACE_S", 0.2)
    pipe = tmp_path / "pid"
    os.mkfifo(pipe)
    launcher = LAUNCHER.replace("signal.pause()", "") if ends else LAUNCHER
    with contextlib.suppress(KeyboardInterrupt), children.children(os.environ) as group:
        child = group.start([sys.executable, "-c", launcher, STUBBORN, pipe], 60.0)
        worker = psutil.Process(int(pipe.read_text()))  # waits until the worker is there
        folder = Path(worker.environ()["TMPDIR"])
        assert folder.is_dir()
        assert child.process
        if not ends:
            raise KeyboardInterrupt
        assert child.process.wait(60) == 0
        assert worker.is_running()
    assert child.process.poll() is not None
    # It is killed by now; the kernel may still be at work on it.
    wait_for("the end", lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("outcome", "facts"),
    [
        (Outcome(0, f'noise\n[1,0]<stdout>:{ANSWER}{{"size": 2}}\n'), {"size": 2}),
        (Outcome(-11, f'{ANSWER}{{"a": 1}}\n'), {"a": 1, "error": "killed by SIGSEGV"}),
        (Outcome(1, "ValueError: why\n"), {"error": "ValueError: why"}),
        (Outcome(5, ""), {"error": "exit code 5, and no word of why"}),
    ],
)
def test_answers(outcome: Outcome, facts: dict[str, object]) -> None:
    assert answer(outcome) == facts


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("Traceback (most recent call last):\n  File x\nOSError: no route to host\n", "OSError: no route to host"),
        ("[1,1]<stderr>:horovod.common.HorovodInternalError: broken\n", "horovod.common.HorovodInternalError: broken"),
        ("-----\nmpirun was unable to find\nthe executable.\nTo fix:\n", "mpirun was unable to find the executable."),
        ("", ""),
    ],
)
def test_first_error(output: str, line: str) -> None:
    assert first_error(output) == line


def test_the_facts_of_this_host(tmp_path: Path) -> None:
    (tmp_path / "data" / "class").mkdir(parents=True)
    (tmp_path / "data" / "class" / "image.jpg").write_bytes(bytes(10))
    found = agent.facts({"names": ["localhost", "no-such-host.invalid"], "data": str(tmp_path / "data")})
    assert found["interfaces"]["127.0.0.1"] == "lo"
    assert found["names"] == {"localhost": ["127.0.0.1"], "no-such-host.invalid": []}
    assert found["data"] == {"files": 1, "bytes": 10}
    assert json.dumps(found)
    assert agent.facts({"names": [], "data": str(tmp_path / "gone")})["data"] is None


def test_hosts_send_each_other_bytes_on_a_port_that_the_system_chose() -> None:
    port = agent.listen({})["port"]
    request = {"host": "127.0.0.1", "limit_s": 60.0}
    assert agent.reach({**request, "port": port, "bytes": 3 << 20})["seconds"] > 0
    assert agent.reach({**request, "port": 1, "bytes": 0}) == {"error": "Connection refused"}


def test_a_cluster_of_one_host_is_examined() -> None:
    """There is a finding for each thing that the host has; this machine needs no ssh."""
    assert cluster.is_here(socket.gethostname())
    assert not cluster.is_here("h1.invalid")
    Path("data").mkdir()
    findings = cluster.examine([Host("localhost", 1)], Path("data"), quick=True, say=lambda line: None)
    found = {finding.name: finding for finding in findings}
    assert found["localhost"].verdict == "ok"
    assert found["data"].what == "0 files of 0 bytes in data on each host"
    assert found["python"].verdict == "ok"
    assert "connections" not in found, "there is no host to connect to"


def test_an_agent_ends_with_its_block_and_one_that_has_ended_says_why() -> None:
    """No process is left behind on any host; a request that cannot be answered is an answer, too."""
    before = set(psutil.Process().children())  # those that other tests share live on
    with cluster.agents([Host("localhost", 1)]) as (one,):
        assert one.ask(60.0, do="listen")["port"] > 0
        assert one.ask(60.0, do="sing")["error"].startswith("KeyError")
        (process,) = set(psutil.Process().children()) - before
        process.kill()
        wait_for("its end", lambda: process.status() == psutil.STATUS_ZOMBIE)
        assert one.ask(60.0, do="listen") == {"error": "exit code -9"}
    assert set(psutil.Process().children()) <= before

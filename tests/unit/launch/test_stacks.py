"""Processes show their stacks to `stacks.look`, which disturbs no others."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

from hvd_train.launch import stacks
from tests.support.launching import wait_for

REGISTER = "from hvd_train.launch import stacks; stacks.register(); stacks.begin(5); "
DUMPS = "import json\ndef run():\n    while True: json.dumps([1, [2]], indent=1)\n"
RUN_THREADS = f"import threading\n{DUMPS}threading.Thread(target=run, daemon=True).start()\n"
HANDLE = "import signal; signal.signal(signal.SIGUSR2, lambda *_: print('handled', flush=True)); "
PROGRAMS = {
    "registered": REGISTER,
    "handles it": HANDLE + REGISTER,
    "handles it later": REGISTER + HANDLE + "stacks.begin(5); ",
    "ends by it": REGISTER + HANDLE + "signal.signal(signal.SIGUSR2, signal.SIG_DFL); ",
    "forked": REGISTER + "import os; os.fork() or sys.stdin.read() or os._exit(0); ",
    "threaded": REGISTER + RUN_THREADS,
    "another's": "",
}


@contextmanager
def waiting(program: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program that then waits for its end in a function of its own."""
    rest = "def rest():\n    print('ready\\n', end='', flush=True)\n    sys.stdin.read()\n"
    code = f"import sys\n{program}\n{rest}rest()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.poll() is None
        assert "handled" not in process.communicate()[0]
        assert process.returncode == 0


def test_only_processes_that_expect_it_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal neither ends a process nor reaches a handler of its program. All show where they
    are, since they have Python's lock.
    """
    monkeypatch.setattr(stacks, "_BETWEEN_S", 0.0)
    with ExitStack() as stack:
        numbers = {
            name: stack.enter_context(waiting(program)).pid for name, program in PROGRAMS.items()
        }
        ranks = stacks.look(Path(), [*numbers.values(), 2**22 + 1])["ranks"]
    found = {name: ranks[number] for name, number in numbers.items() if number in ranks}
    assert len(ranks) == len(found)
    assert [*found, "another's"] == [*PROGRAMS]
    for name, (own, *others) in found.items():
        assert own["step"] == 5
        assert "in rest" in own["stack"]
        forked = [Path(sys.executable).name] if name == "forked" else []
        assert [other["name"] for other in others] == forked
    threads = "".join(found["threaded"][0]["threads"])
    assert "in run" in threads
    assert "in rest" not in threads


def test_a_rank_whose_end_its_parent_has_not_noticed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stacks, "_BETWEEN_S", 0.0)
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        (own,) = stacks.look(Path(), [process.pid])["ranks"][process.pid]
    assert own["state"] == "zombie"


def test_a_host_is_known_by_the_name_that_the_launcher_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOROVOD_HOSTNAME", "node2")
    with waiting(PROGRAMS["registered"]) as rank:
        assert stacks.is_here("node2", [rank.pid])
        assert not stacks.is_here("node3", [rank.pid])
    assert not stacks.is_here("node2", [rank.pid])


def test_a_process_outlives_the_signal_while_its_threads_run() -> None:
    """A reader of stacks that are changing would crash."""
    with waiting(REGISTER + RUN_THREADS) as process:
        folder = Path(f"/proc/{process.pid}/fd")
        file = next(entry for entry in folder.iterdir() if "memfd" in os.readlink(entry))
        for _ in range(150):
            size = file.stat().st_size
            process.send_signal(signal.SIGUSR2)
            wait_for("stacks", lambda size=size: file.stat().st_size > size)

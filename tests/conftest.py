"""Guards around every test: a folder of its own, an unchanged environment, no process left. Time limit: pyproject.

What was skipped is said at the end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import skips

LAUNCHERS = "tests/integration/"
# pytest names the test; torch and the OpenMP of scikit-learn set theirs when they are first used.
SET_BY_LIBRARIES = ("PYTEST_", "TORCHINDUCTOR_", "KMP_")
# Threads that wait in a busy loop take the cores from the ranks they wait for. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A shell starts what runs in its background deaf to Ctrl-C, and children inherit that; tests press Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup, too, is inherited; with a handler in its place the tests outlive their terminal, and what they start does not.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


_skipped: list[str] = []
_LONG = {*(Path(__file__).with_name("long.txt")).read_text().splitlines()}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of long.txt, before those are chosen that have a mark or lack it."""
    for item in items:
        if not _LONG.isdisjoint((item.nodeid, item.nodeid.partition("[")[0])):
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run all tests that start launchers, one after another, and the others whatever is left.

    With `--dist loadfile` and the like, which are not ours, they are given out as pytest-xdist does.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class LaunchersTogether(LoadScopeScheduling):
        """Gives out tests one by one, but those of launchers all at once."""

        def _split_scope(self, nodeid: str) -> str:
            return LAUNCHERS if nodeid.startswith(LAUNCHERS) else nodeid

    return LaunchersTogether(config, log)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the reason of a test that is skipped."""
    if report.skipped and isinstance(report.longrepr, tuple):
        _skipped.append(report.longrepr[2].removeprefix("Skipped: "))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail where a test was skipped for want of a program, if that must not be."""
    if exitstatus == pytest.ExitCode.OK and _forbidden():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was skipped, and what to install."""
    if _skipped:
        terminalreporter.write_line(skips.summary(_skipped), yellow=True)
    if _forbidden():
        terminalreporter.write_line(f"{skips.STRICT}=1: {skips.summary(_forbidden())}, a failure here", red=True)


def _forbidden() -> list[str]:
    wanted = os.environ.get(skips.STRICT) == "1"
    return [reason for reason in _skipped if wanted and skips.for_want_of_a_program(reason)]


@pytest.fixture(autouse=True)
def _own_folder(_no_leaked_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let relative paths lead into the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _no_leaked_environment() -> Iterator[None]:
    """Assert that the environment is as before, and restore it and the import path."""
    environment, path = dict(os.environ), list(sys.path)
    yield  # what a test sets through monkeypatch is taken back before this goes on
    changed = {name for name, value in {*os.environ.items()} ^ {*environment.items()}}
    leaked = {name for name in changed if not name.startswith(SET_BY_LIBRARIES)}
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    assert not leaked, f"the test left these environment variables changed: {sorted(leaked)}"


@pytest.fixture(autouse=True)
def _no_left_processes() -> Iterator[None]:
    """Assert that child processes of the test have ended; those that have not are killed and named."""
    before = set(psutil.Process().children(recursive=True))
    yield
    started = [p for p in psutil.Process().children(recursive=True) if p not in before]
    # One server of multiprocessing and its tracker live as long as the process that asked for loader workers.
    servers = [p for p in started if _is_forkserver(p)]
    own = [p for p in started if p not in servers and not any(s in p.parents() for s in servers if s.is_running())]
    _, left = psutil.wait_procs(own, timeout=2)
    names = [f"{p.pid}: {' '.join(p.cmdline())[:200]}" for p in left if p.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    assert not names, f"the test left processes: {names}"


def _is_forkserver(process: psutil.Process) -> bool:
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "multiprocessing.forkserver" in line or "multiprocessing.resource_tracker" in line


@pytest.fixture(autouse=True)
def _same_thread_count() -> Iterator[None]:
    """Restore the number of torch's threads, where a test has imported torch."""
    torch = sys.modules.get("torch")
    count = torch.get_num_threads() if torch else 0
    yield
    if torch and torch.get_num_threads() != count:
        torch.set_num_threads(count)

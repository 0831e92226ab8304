"""Guard every test: its own folder, an unchanged environment, no remaining process.

Time limits: pyproject.
"""

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[1]
LAUNCHERS = "tests/integration/"
# pytest names the test; torch and the OpenMP of scikit-learn set theirs when they are first used. A
# rank changes what UCX and Open MPI do at a crash.
SET_BY_LIBRARIES = ("PYTEST_", "TORCHINDUCTOR_", "KMP_", "UCX_HANDLE_ERRORS", "OMPI_MCA_opal_")
# Busy-waiting threads would slow down the ranks that they wait for. torch reads this when it is
# imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Background jobs of a shell ignore SIGINT, nohup SIGHUP, and children inherit that; tests send
# both.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    # the tests outlive their terminal, not their child processes
    signal.signal(signal.SIGHUP, lambda *_: None)

NO_SKIPS = "HVD_TRAIN_NO_SKIPS"  # "1": a skipped test is a failure
_skipped = []
_crashed = []


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run all tests that start launchers; with `--dist loadfile`,
    all files that make hosts.
    """
    if config.getoption("dist") not in ("load", "loadfile"):
        return None
    from xdist.scheduler import LoadScopeScheduling

    by_file = config.getoption("dist") == "loadfile"

    class OneAtATime(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if not by_file:
                return "launchers" if file.startswith(LAUNCHERS) else nodeid
            makes_hosts = re.search(
                r"^from tests\.support.*hosts", (ROOT / file).read_text(), re.MULTILINE
            )
            return "hosts" if makes_hosts else file

    return OneAtATime(config, log)


def pytest_collection_finish() -> None:
    """Let the collector of garbage skip what lives as long as the tests: modules and tests."""
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _skipped.append(report.nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Record crashes of test processes: their remaining tests were not run."""
    if error:
        _crashed.append(node)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail if a process of pytest crashed, or if a test was skipped and none may be."""
    gc.unfreeze()
    if _crashed:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
    elif exitstatus == pytest.ExitCode.OK and _skipped and os.environ.get(NO_SKIPS) == "1":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _own_folder(
    _no_leaked_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _no_leaked_environment() -> Iterator[None]:
    """Assert that the environment is unchanged, and restore it and the import path."""
    environment = dict(os.environ)
    path = list(sys.path)
    yield  # monkeypatch has restored its changes when this continues
    changed = {name for name, value in {*os.environ.items()} ^ {*environment.items()}}
    leaked = {name for name in changed if not name.startswith(SET_BY_LIBRARIES)}
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    assert not leaked, f"the test left these environment variables changed: {sorted(leaked)}"


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """Collect no garbage in a test: its ranks are threads, which torch would let wait for ever.

    `get_rng_state` holds a lock while it makes a tensor. If Python then collects another tensor,
    it lets a thread run that may want the lock, and keeps the interpreter meanwhile.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _no_left_processes() -> Iterator[None]:
    """Assert that child processes of the test have ended; kill and name those that have not."""
    before = set(_children())
    yield
    _, left = psutil.wait_procs(
        [one for one in _children() if one not in before and not _of_loaders(one)], timeout=20
    )
    names = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                names.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
    assert not names, f"the test left processes: {names}"


def _children() -> list[psutil.Process]:
    """Return all descendants of this process. A quick look finds out whether there are any."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError):  # the thread has ended
            if children.read_text():
                return psutil.Process().children(recursive=True)
    return []


def _of_loaders(process: psutil.Process) -> bool:
    """Return whether this is multiprocessing's server, its tracker or a fork; they
    live as long as the tests.
    """
    with suppress(psutil.Error):
        return (
            re.search(
                r"multiprocessing\.(forkserver|resource_tracker)", " ".join(process.cmdline())
            )
            is not None
        )
    return False

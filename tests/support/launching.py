"""Start real launchers, and leave no process running."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from types import MappingProxyType

import psutil

PROGRAMS = Path(sys.executable).parent
HVD_TRAIN = str(PROGRAMS / "hvd-train")
LAUNCHERS = {
    "gloo": ["horovodrun", "--gloo", "-np"],
    "mpi": ["horovodrun", "--mpi", "-np"],
    # By default Open MPI refuses root, and more ranks than cores.
    "mpirun": ["mpirun", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-np"],
}


def launch_line(launcher: str, ranks: int, *command: str) -> list[str]:
    """Return the command that starts `command` on this many ranks ("none": alone)."""
    if launcher == "none":
        return list(command)
    name, *options = LAUNCHERS[launcher]
    return [str(PROGRAMS / name), *options, str(ranks), *command]


@contextmanager
def started(
    command: list[str], folder: Path, output: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program in its own session, with its output in a file, and kill what remains of it at the end.

    It sees no GPU, unless `variables` say so.
    """
    path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **variables}
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=DEVNULL, stdout=file, stderr=STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                for one in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        one.kill()
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finished(
    command: list[str], folder: Path, limit_s: float = 280, variables: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, str]:
    """Run a program to its end; return its exit code and output. Raises: AssertionError: after `limit_s` seconds."""
    output = folder / "output.txt"
    with started(command, folder, output, variables) as process, suppress(subprocess.TimeoutExpired):
        return process.wait(limit_s), output.read_text()
    printed = output.read_text()
    raise AssertionError(f"{shlex.join(command)} has not ended within {limit_s:.0f} s; it printed:\n{printed}")


def output_of(
    command: list[str],
    folder: Path,
    limit_s: float = 280,
    variables: Mapping[str, str] = MappingProxyType({}),
    code: int = 0,
) -> str:
    """Run a program to its end, as `finished` does; assert its exit code and return its output."""
    found, output = finished(command, folder, limit_s, variables)
    assert found == code, output
    return output


def wait_for(what: str, condition: Callable[[], object], limit_s: float = 150, poll_s: float = 0.05) -> None:
    """Poll until `condition` holds. Raises: AssertionError: after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}"
        time.sleep(poll_s)


def ranks_of(launcher: subprocess.Popen[bytes], word: str) -> list[psutil.Process]:
    """Return the Python processes below a launcher that have `word` among their arguments."""
    found = []
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with suppress(psutil.Error):
            arguments = process.cmdline()
            if word in arguments and Path(arguments[0]).name.startswith("python"):
                found.append(process)
    return found

"""Start programs, launchers and the scripts of horovodrun_scripts/ as a user does, and
leave no process running.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

import psutil

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = PROJECT / "horovodrun_scripts"
LOCALHOST = PROJECT / "hostfiles" / "localhost"
DOCS = PROJECT / "docs"
PROGRAMS = Path(sys.executable).parent
HVD_TRAIN = str(PROGRAMS / "hvd-train")
LAUNCHERS = {
    "gloo": ["horovodrun", "--gloo", "-np"],
    "mpi": ["horovodrun", "--mpi", "-np"],
    # By default Open MPI refuses root, and more ranks than cores.
    "mpirun": [
        "mpirun",
        "--oversubscribe",
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        "-np",
    ],
    "launch": ["hvd-train", "launch", "--with", "mpirun", "--np"],
}
AWKWARD = [
    "two words",
    "",
    "it's",
    'a "b"',
    "; touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME",
    "*",
]
AWKWARD += [r"a\b", "line\nbreak", "--", "-np", "--a", "é"]
# a clone may lie in a path with a blank, which no #! line can name
PYTHON = shlex.quote(sys.executable)
# what the fixture `program` gives: writes a script of that name and body
Program = Callable[[str, str], Path]


def launch_line(launcher: str, ranks: int, *command: str) -> list[str]:
    """Return the command that starts `command` on this many ranks ("none": alone)."""
    if launcher == "none":
        return list(command)
    name, *options = LAUNCHERS[launcher]
    return [str(PROGRAMS / name), *options, str(ranks), *command]


def _environment(variables: Mapping[str, str] | None) -> dict[str, str]:
    path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **(variables or {})}


@contextmanager
def started(
    command: list[str], folder: Path, output: Path, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program in its own session, with its output in a file, and kill what
    remains of it at the end.

    It sees no GPU, unless `variables` say so.
    """
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=_environment(variables),
            stdin=DEVNULL,
            stdout=file,
            stderr=STDOUT,
            start_new_session=True,
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
    command: list[str],
    folder: Path,
    limit_s: float = 280,
    variables: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run a program to its end; return its exit code and output.

    Raises: AssertionError: after `limit_s` seconds.
    """
    output = folder / "output.txt"
    with (
        started(command, folder, output, variables) as process,
        suppress(subprocess.TimeoutExpired),
    ):
        return process.wait(limit_s), output.read_text()
    printed = output.read_text()
    raise AssertionError(
        f"{shlex.join(command)} has not ended within {limit_s:.0f} s; it printed:\n{printed}"
    )


def output_of(
    command: list[str],
    folder: Path,
    limit_s: float = 280,
    variables: Mapping[str, str] | None = None,
    code: int = 0,
) -> str:
    """Run a program to its end, as `finished` does; assert its exit code and return its output."""
    found, output = finished(command, folder, limit_s, variables)
    assert found == code, output
    return output


def wait_for(what: str, condition: Callable[[], object], limit_s: float = 150) -> None:
    """Poll until `condition` holds. Raises: AssertionError: after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}"
        time.sleep(0.01)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a JSON Lines file that may be absent or growing."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def records(kind: str, folder: Path = Path("run")) -> list[dict[str, Any]]:
    """Return the lines of this kind in metrics.jsonl."""
    return [line for line in json_lines(folder / "metrics.jsonl") if line["kind"] == kind]


def notes() -> list[str]:
    return [event["message"] for event in records("event") if event["name"] == "note"]


def ranks_of(launcher: subprocess.Popen[bytes], word: str) -> list[psutil.Process]:
    """Return the Python processes below a launcher that have `word` among their arguments."""
    found = []
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with suppress(psutil.Error):
            arguments = process.cmdline()
            if word in arguments and Path(arguments[0]).name.startswith("python"):
                found.append(process)
    return found


def run(
    script: str | Path, *arguments: str | Path, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of horovodrun_scripts/ in a folder, and leave no process."""
    command = [str(SCRIPTS / script), *map(str, arguments)]
    options = {"cwd": cwd, "env": _environment(environment), "stdin": DEVNULL, "text": True}
    with subprocess.Popen(
        command, **options, stdout=PIPE, stderr=PIPE, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=200)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def write_program(folder: Path, name: str, body: str) -> Path:
    """Write a shell script that is found by its name if the folder is on the PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def commands(page: str) -> dict[str, list[str]]:
    """Return for each heading of a page of docs/ (or ../README.md) the lines of its code
    blocks, without comments.
    """
    found = {}
    for section in (DOCS / page).read_text(encoding="utf-8").split("\n## ")[1:]:
        blocks = re.findall(r"^```\w*\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        lines = [
            line.partition(" # ")[0].strip() for block in blocks for line in block.splitlines()
        ]
        if lines := [line for line in lines if line]:
            found[section.partition("\n")[0]] = lines
    return found

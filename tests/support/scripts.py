"""Run the scripts of horovodrun_scripts/ as a user does, or print what they would start."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE

from tests.support.launching import PROGRAMS
from tests.support.programs import write_program

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = PROJECT / "horovodrun_scripts"
LOCALHOST = PROJECT / "hostfiles" / "localhost"
AWKWARD = ["two words", "", "it's", 'a "b"', "; touch pwned", "$(touch pwned)", "`touch pwned`", "$HOME", "*"]
AWKWARD += [r"a\b", "line\nbreak", "--", "-np", "é"]
PYTHON = shlex.quote(sys.executable)  # a clone may lie in a path with a blank, which no #! line can name


def run(
    script: str | Path, *arguments: str | Path, cwd: Path, timeout_s: float = 200, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder as a user does, and leave no process."""
    path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [str(SCRIPTS / script), *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def dry_run(script: str | Path, *arguments: str | Path, cwd: Path, **environment: str) -> list[str]:
    """Return the words of the one line that --dry-run prints."""
    result = run(script, "--dry-run", *arguments, cwd=cwd, **environment)
    assert (result.returncode, result.stderr) == (0, "")
    return shlex.split(result.stdout)


def program(path: Path, text: str) -> Path:
    return write_program(path.parent, path.name, text)

"""What is typed: it arrives as it was, or is one line of error."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import AWKWARD, LOCALHOST, PROGRAMS, PYTHON, program, run

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train_local.sh", "--epochs", "5"], "unknown argument '--epochs'"),
        (["train_local.sh", "digits"], "unknown argument 'digits'"),
        (["train_local.sh", "-n"], "-n takes a number of ranks from 1, not ''"),
        (["train_local.sh", "-n", "0"], "-n takes a number of ranks from 1, not '0'"),
        (["train_local.sh", "-n", "two"], "-n takes a number of ranks from 1, not 'two'"),
        (["train_hostfile.sh"], "which host file?"),
        (["train_hostfile.sh", "--", "digits"], "which host file?"),
        (["train_hostfile.sh", "nowhere"], "there is no host file nowhere"),
        (["train_hostfile.sh", "."], "there is no host file ."),
        (["train_hostfile.sh", "bad", "--nope"], "unknown argument '--nope'"),
        (["train_hostfile.sh", "bad", "digits"], "two host files, 'bad' and 'digits'"),
        (["train_hostfile.sh", "bad"], "bad, line 2: 'b slots=two' is not of the form 'NAME slots=N'"),
        (["train_hostfile.sh", "empty"], "empty has no slots"),
        (["train_hostfile.sh", "option"], "option, line 2: '-G slots=1' is not of the form 'NAME slots=N'"),
        (["train_mpirun.sh", "option"], "option, line 2: '-G slots=1' is not of the form 'NAME slots=N'"),
        (["train_docker.sh", "option"], "option, line 2: '-G slots=1' is not of the form 'NAME slots=N'"),
        (
            ["train_hostfile.sh", "empty", "--env"],
            "--env takes the name of a variable, whose value is in the environment",
        ),
        (["train_hostfile.sh", "empty", "--env", "A=hunter2"], "--env takes the name of a variable, whose value is in"),
        (["train_elastic.sh", "--env", "NOT_SET"], "--env NOT_SET: there is no such variable in the environment"),
        (
            ["train_mpirun.sh", "empty", "--env", "NOT_SET"],
            "--env NOT_SET: there is no such variable in the environment",
        ),
        (["train_docker.sh", "empty", "--env", "a-b"], "--env takes the name of a variable, whose value is in"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    """Wrong input is one line on stderr that begins with the script's name, and exit code 2."""
    (tmp_path / "bad").write_text("a slots=1\nb slots=two\n", encoding="utf-8")
    (tmp_path / "option").write_text("a slots=1\n-G slots=1\n", encoding="utf-8")
    (tmp_path / "empty").write_text("# no hosts yet\n", encoding="utf-8")
    result = run(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"{arguments[0]}: {says}")
    assert "hunter2" not in result.stderr


@pytest.mark.parametrize(
    ("script", "controller"),
    [(["train_local.sh", "-n", "2"], "--gloo"), (["train_hostfile.sh", LOCALHOST], "--mpi")],
    ids=["local gloo", "hostfile mpi"],
)
def test_arguments_arrive_as_typed(script: list[str | Path], controller: str, tmp_path: Path) -> None:
    """Blanks, quotes, `;`, `$()` and line breaks reach every rank unchanged, over Gloo and MPI."""
    record = (
        "import json, os, pathlib, sys\n"
        "rank = os.environ.get('HOROVOD_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        "pathlib.Path(f'rank-{rank}').write_text(json.dumps(sys.argv[1:]))"
    )
    recorder = program(tmp_path / "stand in" / "hvd-train", f'exec {PYTHON} -c {shlex.quote(record)} "$@"')
    path = f"{recorder.parent}:{PROGRAMS}:{os.environ['PATH']}"
    result = run(*script, controller, "--", *AWKWARD, cwd=tmp_path, PATH=path)
    assert result.returncode == 0, result.stderr
    arrived = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in tmp_path.glob("rank-*")}
    assert arrived == {"rank-0": ["train", *AWKWARD], "rank-1": ["train", *AWKWARD]}
    assert not (tmp_path / "pwned").exists()


def test_dry_run_can_be_typed(tmp_path: Path) -> None:
    """A shell reads the line that --dry-run prints as the same command, whatever the arguments hold."""
    result = run("train_local.sh", "--dry-run", "--", *AWKWARD, cwd=tmp_path)
    split = ["bash", "-c", f"printf '%s\\0' {result.stdout}"]
    shell = subprocess.run(split, capture_output=True, text=True, check=True, timeout=60)
    assert shell.stdout.split("\0")[:-1][-len(AWKWARD) :] == AWKWARD
    assert not (tmp_path / "pwned").exists()

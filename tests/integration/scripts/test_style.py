"""How the scripts are written, and what they say about themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import PROJECT, SCRIPTS, run

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("script", ["train_local.sh", "train_hostfile.sh"])
def test_help_is_the_comment_at_the_top(script: str, tmp_path: Path) -> None:
    """--help shows what the script does, how it is typed and how long it takes, and none of its code."""
    result = run(script, "--help", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"{script} " in result.stdout
    assert "--dry-run" in result.stdout
    assert "minute" in result.stdout
    assert "set -euo pipefail" not in result.stdout


def test_shellcheck_has_nothing_to_say() -> None:
    """shellcheck has no complaint about any shell script of the project."""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not on this machine: apt install shellcheck")
    scripts = [
        *sorted(SCRIPTS.glob("*.sh")),
        *sorted(SCRIPTS.glob("*.sbatch")),
        *sorted((PROJECT / "packaging").glob("*.sh")),
    ]
    command = ["shellcheck", "--external-sources", *map(str, scripts)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("train_*.sh")), ids=lambda path: path.name)
def test_each_script_opens_with_what_it_does_and_ends_with_exec(path: Path) -> None:
    """Each script is executable, says first what it is for, and becomes the command that it starts.

    Only train_docker.sh stays, and removes its containers.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    assert os.access(path, os.X_OK)
    assert lines[0] == "#!/usr/bin/env bash"
    assert lines[1].startswith("# Train ")
    assert "set -euo pipefail" in lines
    last = [] if path.name == "train_docker.sh" else lines[-1:]
    assert [line for line in lines if line.startswith("exec ")] == last

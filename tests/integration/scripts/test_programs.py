"""Where the scripts find horovodrun and hvd-train."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import SCRIPTS, program, run

pytestmark = pytest.mark.integration


def test_own_environment_is_found_from_a_path_with_blanks(tmp_path: Path, system_only: str) -> None:
    """If horovodrun is not on the PATH, the clone's own .venv is used, even through a link."""
    clone = tmp_path / "my clone's folder"
    shutil.copytree(SCRIPTS, clone / "horovodrun_scripts")
    program(clone / ".venv" / "bin" / "hvd-train", 'for word in "$@"; do echo "<$word>"; done')
    program(clone / ".venv" / "bin" / "horovodrun", 'shift 3; "$@"')
    link = tmp_path / "train"
    link.symlink_to(clone / "horovodrun_scripts" / "train_local.sh")

    real = run(link, "--", "a b", cwd=tmp_path, PATH=system_only)
    assert (real.returncode, real.stdout, real.stderr) == (0, "<train>\n<a b>\n", "")

    printed = run(link, "--dry-run", "--", "a b", cwd=tmp_path, PATH=system_only).stdout
    typed = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=False, timeout=60)
    assert (typed.returncode, typed.stdout, typed.stderr) == (0, "<train>\n<a b>\n", "")


@pytest.mark.parametrize("missing", ["horovodrun", "hvd-train"])
def test_a_missing_program_is_one_line(missing: str, tmp_path: Path, system_only: str) -> None:
    """A clone that was not set up prints one line that names what is missing and what to type."""
    clone = tmp_path / "clone"
    shutil.copytree(SCRIPTS, clone / "horovodrun_scripts")
    for name in {"horovodrun", "hvd-train"} - {missing}:
        program(clone / ".venv" / "bin" / name, "exit 9")
    result = run(clone / "horovodrun_scripts" / "train_local.sh", cwd=tmp_path, PATH=system_only)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert f"there is no {missing} " in result.stderr
    assert f"make -C {clone} " in result.stderr

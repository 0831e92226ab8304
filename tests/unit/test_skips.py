"""What is skipped is said, and in CI it is a failure where a program is all that lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import skips

ROOT = Path(__file__).parents[2]
NO_SHELLCHECK = "1 test (shellcheck is not on this machine: apt install shellcheck)"


def test_one_line_for_all() -> None:
    """With the number of tests of each reason, the most frequent one first."""
    assert skips.summary(["no a: apt install a", "b", "b"]) == "skipped: 2 tests (b), 1 test (no a: apt install a)"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("ip, sshd not on this machine: apt install iproute2 util-linux openssh-server openssh-client", True),
        ("no chromium on the PATH (apt-get install chromium)", True),
        ("slurmctld not on this machine: apt install slurmctld slurmd munge", False),
        ("there is no nft: apt install nftables", False),
        ("namespaces with networks of their own take root", False),
    ],
)
def test_what_must_not_be_skipped_in_ci(reason: str, expected: bool) -> None:
    """What apt brings to any machine; not Slurm, nor what the machine does not allow."""
    assert skips.for_want_of_a_program(reason) == expected


@pytest.mark.parametrize(("strict", "code"), [("", 0), ("1", 1)])
def test_a_machine_without_shellcheck(strict: str, code: int, tmp_path: Path) -> None:
    """The last lines name it; in CI the tests then fail, however many passed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/integration/scripts/test_style.py"]
    done = subprocess.run(
        [*command, "-k", "shellcheck"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path), skips.STRICT: strict},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert f"skipped: {NO_SHELLCHECK}\n" in done.stdout
    assert (f"{skips.STRICT}=1: skipped: {NO_SHELLCHECK}, a failure here\n" in done.stdout) == bool(code)

"""`python -m hvd_train`, which needs nothing on the PATH."""

from __future__ import annotations

import subprocess
import sys

from hvd_train import cli


def test_the_package_can_be_run() -> None:
    """With the same output and exit codes as `hvd-train`."""

    def run(*arguments: str) -> tuple[int, str, str]:
        line = [sys.executable, "-m", "hvd_train", *arguments]
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout, done.stderr

    assert run("--help") == (0, cli.overview(), "")
    assert run("trian") == (2, "", "hvd-train: unknown command 'trian'; did you mean 'train'?\n")

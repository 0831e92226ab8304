"""Real trainings by the scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.scripts import LOCALHOST, dry_run, run

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("script", "controller"),
    [(["train_local.sh"], "--gloo"), (["train_hostfile.sh", LOCALHOST], "--mpi")],
    ids=["local gloo", "hostfile mpi"],
)
def test_trains_the_digits(script: list[str | Path], controller: str, tmp_path: Path) -> None:
    """A real training of two epochs runs on as many ranks as the script says."""
    words = dry_run(*script, controller, cwd=tmp_path)
    num_ranks = int(words[words.index("-np") + 1])
    output = tmp_path / "my run"
    result = run(
        *script,
        controller,
        "--",
        "digits",
        "--epochs",
        "2",
        "--output-dir",
        output,
        cwd=tmp_path,
        timeout_s=240,
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    assert summary["world_size"] == num_ranks
    assert summary["top1"] > 0.5, "two epochs of the digits are far above chance, which is 0.1"


def test_a_failed_training_fails_the_script(tmp_path: Path) -> None:
    """A training that could not start is a failure of the script, too."""
    result = run("train_local.sh", "--", "no-such-recipe", cwd=tmp_path)
    assert result.returncode != 0

"""Commands as processes on a run folder that somebody else has planted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hvd_train.network.small import digits_convnet
from tests.support.launching import HVD_TRAIN, finished
from tests.support.run_folders import whole_run, write

pytestmark = pytest.mark.integration


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Return a run folder below the current folder whose config names code that it brings along."""
    run = write(tmp_path / "runs" / "evil", whole_run(), summary=True, model="runs.evil.payload:net")
    (run / "payload.py").write_text(
        "import pathlib\npathlib.Path('owned').touch()\nfrom hvd_train.network.small import digits_convnet as net\n"
    )
    torch.save(digits_convnet(10).state_dict(), run / "model-best.pt")
    return run


@pytest.mark.parametrize("command", [["evaluate"], ["export"], ["config", "--config"], ["show-data", "--config"]])
def test_code_of_a_run_is_not_imported(command: list[str], planted: Path, tmp_path: Path) -> None:
    """Whoever reads a run is told, in one line, which code it names and what to type, and nothing of it runs."""
    target = "runs/evil/config.yaml" if "--config" in command else "runs/evil"
    code, output = finished([HVD_TRAIN, *command, target], tmp_path)
    assert not (tmp_path / "owned").exists()
    assert code == 2, output
    assert output == (
        f"hvd-train: {target} names code (model: runs.evil.payload:net), which only `train` imports unasked; "
        "if you trust who wrote it, add --trust\n"
    )


def test_a_report_goes_without_the_predictions_of_code(planted: Path, tmp_path: Path) -> None:
    """The page is complete but for them, and the line that says so names --trust."""
    code, output = finished([HVD_TRAIN, "report", "runs/evil"], tmp_path)
    assert not (tmp_path / "owned").exists()
    assert code == 0, output
    assert "hvd-train: no predictions: runs/evil names code (model: runs.evil.payload:net)" in output
    assert "no predictions: runs/evil names code" in (tmp_path / "report.html").read_text()


def test_code_of_a_run_is_imported_where_the_user_trusts_it(planted: Path, tmp_path: Path) -> None:
    """The own model of an honest run is scored with --trust."""
    code, output = finished([HVD_TRAIN, "evaluate", "runs/evil", "--trust"], tmp_path)
    assert code == 0, output
    assert (tmp_path / "owned").exists()
    assert "(360 samples)" in output


IS_NONE = "it is no file, but a pipe or a device"


def with_pipes(folder: Path, *names: str) -> None:
    """Write a run folder in which these files are pipes that nobody writes into."""
    run = write(folder / "run", whole_run(), summary=True)
    (run / "ledger.jsonl").touch()
    torch.save(digits_convnet(10).state_dict(), run / "model-best.pt")
    for name in names:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)


@pytest.mark.parametrize(
    ("line", "pipe", "error"),
    [
        ("audit run", "ledger.jsonl", "cannot read run/ledger.jsonl"),
        ("audit run", "metrics.jsonl", "cannot read run/metrics.jsonl"),
        ("evaluate run", "config.yaml", "cannot read run/config.yaml"),
        ("evaluate run", "model-best.pt", "cannot read the weights run/model-best.pt"),
        ("evaluate run/step.ckpt", "step.ckpt", "run/step.ckpt"),
        ("export run", "model-best.pt", "cannot read the weights run/model-best.pt"),
        ("config --config run/config.yaml", "config.yaml", "cannot read run/config.yaml"),
    ],
)
def test_no_command_waits_for_a_pipe(line: str, pipe: str, error: str, tmp_path: Path) -> None:
    """It is one line, exit code 2."""
    with_pipes(tmp_path, pipe)
    assert finished([HVD_TRAIN, *line.split()], tmp_path, 100) == (2, f"hvd-train: {error}: {IS_NONE}\n")


@pytest.mark.parametrize("line", ["report run", "watch run"])
def test_pipes_are_gaps_in_what_is_shown_of_a_run(line: str, tmp_path: Path) -> None:
    """The page and the picture are there all the same, and name each of them."""
    gaps = ["config.yaml", "metrics.jsonl", "summary.json", "environment.json"]
    with_pipes(tmp_path, *gaps, ".lock", "model-best.pt", "scaling.json")
    code, output = finished([HVD_TRAIN, *line.split()], tmp_path, 100)
    assert code == 0, output
    text = (tmp_path / "report.html").read_text() if line == "report run" else output
    shown = " ".join(text.replace("│", "").split())
    for name in gaps:
        assert f"{name} cannot be read ({IS_NONE})" in shown


TRAIN = [HVD_TRAIN, "train", "digits", "--epochs", "1", "--device", "cpu", "--output-dir", "out"]


def test_a_training_writes_through_no_link(tmp_path: Path) -> None:
    """What is planted in an empty folder or in a run is refused in one line, and the files outside stay as they are."""
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (tmp_path / "out").mkdir()
    for name, refused in ((".lock", True), ("config.yaml.partial", False), ("metrics.jsonl", True)):
        (tmp_path / "out" / name).unlink(missing_ok=True)
        (tmp_path / "out" / name).symlink_to(outside)
        code, output = finished(TRAIN, tmp_path)
        assert outside.read_text() == "precious", name
        assert (code == 2) == refused, output
        assert "Traceback" not in output
        if refused:
            assert f"out/{name}" in output
            assert "is a link" in output
            (tmp_path / "out" / name).unlink()

"""Commands on a run folder that another user planted."""

import os
from pathlib import Path

import pytest
import torch

from hvd_train import cli
from hvd_train.network.models import digits_convnet
from tests.support.run_folders import whole_run, write

UNASKED = "names code (model: runs.evil.payload:net), which only `train` imports unasked"


@pytest.fixture
def evil() -> Path:
    """Return a run folder whose config names code in that folder."""
    run = write(Path("runs/evil"), whole_run(), summary=True, model="runs.evil.payload:net")
    (run / "payload.py").write_text(
        "import pathlib\npathlib.Path('owned').touch()\nfrom hvd_train.network.models import digits_convnet as net\n"
    )
    torch.save(digits_convnet(10).state_dict(), run / "model-best.pt")
    return run


def test_code_of_a_run_is_imported_only_with_trust(evil: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the code and what to type."""
    for command, target in (("evaluate", evil), ("export", evil), ("config --config", evil / "config.yaml")):
        assert cli.run([*command.split(), str(target)]) == 2
        assert capsys.readouterr().err == f"hvd-train: {target} {UNASKED}; if you trust who wrote it, add --trust\n"
    assert cli.run(["report", str(evil)]) == 0
    assert not Path("owned").exists()
    assert cli.run(["evaluate", str(evil), "--trust"]) == 0
    assert Path("owned").exists()
    assert "(360 samples)" in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["data", "task", "optimizer", "schedule"])
def test_each_setting_that_names_code_needs_trust(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(Path("runs/evil"), whole_run(), **{setting: "runs.evil.payload:net", "nesterov": False})
    (run / "payload.py").write_text("import pathlib\npathlib.Path('owned').touch()\n")
    assert cli.run(["config", "--config", str(run / "config.yaml")]) == 2
    assert f"names code ({setting}: runs.evil.payload:net)" in capsys.readouterr().err
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    ("command", "pipe", "error"),
    [
        ("audit", "ledger.jsonl", "cannot read run/ledger.jsonl"),
        ("evaluate", "config.yaml", "cannot read run/config.yaml"),
        ("export", "model-best.pt", "cannot read the weights run/model-best.pt"),
    ],
)
def test_no_command_waits_for_a_pipe(command: str, pipe: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(Path("run"), whole_run(), summary=True)
    torch.save(digits_convnet(10).state_dict(), run / "model-best.pt")
    (run / pipe).unlink(missing_ok=True)
    os.mkfifo(run / pipe)
    assert cli.run([command, "run"]) == 2
    assert capsys.readouterr().err == f"hvd-train: {error}: it is no file, but a pipe or a device\n"

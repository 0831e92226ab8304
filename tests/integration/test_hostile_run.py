"""Commands on a run folder that another user planted."""

import os
from pathlib import Path

import pytest
import torch

from hvd_train.network.models import digits_convnet
from tests.support.launching import HVD_TRAIN, finished, output_of
from tests.support.run_folders import whole_run, write

pytestmark = pytest.mark.integration
slow = pytest.mark.slow


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Return a run folder whose config names code in that folder."""
    run = write(tmp_path / "runs" / "evil", whole_run(), summary=True, model="runs.evil.payload:net")
    (run / "payload.py").write_text(
        "import pathlib\npathlib.Path('owned').touch()\nfrom hvd_train.network.models import digits_convnet as net\n"
    )
    torch.save(digits_convnet(10).state_dict(), run / "model-best.pt")
    return run


@pytest.mark.parametrize(
    "command", ["evaluate", *(pytest.param(one, marks=slow) for one in ("export", "config --config"))]
)
def test_code_of_a_run_is_not_imported(command: str, planted: Path, tmp_path: Path) -> None:
    """One line names the code and what to type."""
    target = "runs/evil/config.yaml" if "--config" in command else "runs/evil"
    code, output = finished([HVD_TRAIN, *command.split(), target], tmp_path)
    assert not (tmp_path / "owned").exists()
    assert code == 2, output
    assert output == (
        f"hvd-train: {target} names code (model: runs.evil.payload:net), which only `train` imports unasked; "
        "if you trust who wrote it, add --trust\n"
    )


@slow
def test_code_of_a_run_is_imported_only_with_trust(planted: Path, tmp_path: Path) -> None:
    """A report has no predictions of such code, and says so; --trust scores the model."""
    code, output = finished([HVD_TRAIN, "report", "runs/evil"], tmp_path)
    assert not (tmp_path / "owned").exists()
    assert code == 0, output
    assert "hvd-train: no predictions: runs/evil names code (model: runs.evil.payload:net)" in output
    assert "no predictions: runs/evil names code" in (tmp_path / "report.html").read_text()
    output = output_of([HVD_TRAIN, "evaluate", "runs/evil", "--trust"], tmp_path)
    assert (tmp_path / "owned").exists()
    assert "(360 images)" in output


IS_NONE = "it is no file, but a pipe or a device"


@pytest.mark.parametrize(
    ("line", "pipe", "error"),
    [
        ("audit run", "ledger.jsonl", "cannot read run/ledger.jsonl"),
        pytest.param("evaluate run", "config.yaml", "cannot read run/config.yaml", marks=slow),
        pytest.param("export run", "model-best.pt", "cannot read the weights run/model-best.pt", marks=slow),
    ],
)
def test_no_command_waits_for_a_pipe(line: str, pipe: str, error: str, tmp_path: Path) -> None:
    run = write(tmp_path / "run", whole_run(), summary=True)
    torch.save(digits_convnet(10).state_dict(), run / "model-best.pt")
    (run / pipe).unlink(missing_ok=True)
    os.mkfifo(run / pipe)
    assert finished([HVD_TRAIN, *line.split()], tmp_path) == (2, f"hvd-train: {error}: {IS_NONE}\n")

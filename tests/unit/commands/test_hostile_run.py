"""Commands on a run folder that another user planted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_train import cli
from hvd_train.network.models import digits_convnet
from hvd_train.report.page import Chart
from tests.support.run_folders import whole_run, write

UNASKED = "names runs.evil.payload:net as its model, which only `train` opens unasked"


@pytest.fixture
def evil() -> Path:
    """Return a run folder whose config names code in that folder."""
    run = write(Path("runs/evil"), whole_run(), summary=True, model="runs.evil.payload:net")
    (run / "payload.py").write_text(
        "import pathlib\npathlib.Path('owned').touch()\nfrom hvd_train.network.models import "
        "digits_convnet as net\n"
    )
    torch.save(digits_convnet(10).state_dict(), run / "model-best.pt")
    return run


def test_code_of_a_run_is_imported_only_with_trust(
    evil: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names the code and what to type."""
    for command, target in (
        ("evaluate", evil),
        ("export", evil),
        ("config --config", evil / "config.yaml"),
    ):
        assert cli.run([*command.split(), str(target)]) == 2
        assert (
            capsys.readouterr().err
            == f"hvd-train: {target} {UNASKED}; if you trust who wrote it, add --trust\n"
        )
    monkeypatch.setattr(Chart, "shown", lambda chart: (b"", "{}"))
    assert cli.run(["report", str(evil)]) == 0
    assert not Path("owned").exists()
    assert cli.run(["evaluate", str(evil), "--trust"]) == 0
    assert Path("owned").exists()
    assert "(360 samples)" in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["data", "task", "optimizer", "schedule"])
def test_each_setting_that_names_code_needs_trust(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(
        Path("runs/evil"), whole_run(), **{setting: "runs.evil.payload:net", "nesterov": False}
    )
    (run / "payload.py").write_text("import pathlib\npathlib.Path('owned').touch()\n")
    assert cli.run(["config", "--config", str(run / "config.yaml")]) == 2
    assert f"names runs.evil.payload:net as its {setting}" in capsys.readouterr().err
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "timm:hf-hub:evil/net"}, "unknown model of timm 'hf-hub:evil/net'"),
        ({"model": "timm:local-dir:evil"}, "unknown model of timm 'local-dir:evil'"),
        ({"model": "resnet1"}, "unknown model 'resnet1'"),
        ({"data": "hf:runs/evil"}, "names hf:runs/evil as its data"),
        (
            {"data": "cifar10", "download": True, "data_dir": "elsewhere"},
            "not found whole in elsewhere",
        ),
    ],
)
def test_a_run_asks_for_nothing_from_elsewhere(
    settings: dict[str, Any],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No repository is asked, and no folder is made."""
    monkeypatch.setattr("torchvision.datasets.CIFAR10.download", lambda data: None)
    run = write(Path("runs/evil"), whole_run(), **settings)
    torch.save(digits_convnet(10).state_dict(), run / "model-best.pt")
    assert cli.run(["evaluate", str(run)]) == 2
    assert says in capsys.readouterr().err
    assert not Path("elsewhere").exists()


def test_a_url_of_a_config_is_not_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = list[str]()
    monkeypatch.setattr("hvd_train.run_files.remote.file_system", opened.append)
    run = write(Path("runs/evil"), [], output_dir=Path("x"), copy_to="sftp://evil/x")
    assert cli.run(["config", "--config", str(run / "config.yaml")]) == 2
    assert "names sftp://evil/x as its copy_to" in capsys.readouterr().err
    assert opened == []

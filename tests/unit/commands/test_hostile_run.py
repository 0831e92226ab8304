"""Commands on a run folder that another user planted."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hvd_train.network.models import digits_convnet
from tests.support.run_folders import whole_run, write
from tests.unit.commands.conftest import Command

UNASKED = "names runs.evil.payload:net as its model, which only `train` opens unasked"


def planted(**settings: Any) -> None:
    """Write a run folder whose config may name code in that folder, with weights."""
    write(Path("runs/evil"), whole_run(), summary=True, **settings)
    Path("runs/evil/payload.py").write_text(
        "import pathlib\npathlib.Path('owned').touch()\nfrom hvd_train.network.models import "
        "digits_convnet as net\n"
    )
    torch.save(digits_convnet(10).state_dict(), "runs/evil/model-best.pt")


@pytest.mark.usefixtures("_no_charts")
def test_code_of_a_run_is_imported_only_with_trust(command: Command) -> None:
    """One line names the code and what to type."""
    planted(model="runs.evil.payload:net")
    for line in (
        "evaluate runs/evil",
        "export runs/evil",
        "config --config runs/evil/config.yaml",
    ):
        says = f"{line.split()[-1]} {UNASKED}; if you trust who wrote it, add --trust\n"
        assert command(line, 2).err == f"hvd-train: {says}"
    command("report runs/evil")
    assert not Path("owned").exists()
    assert "(360 samples)" in command("evaluate runs/evil --trust").out
    assert Path("owned").exists()


@pytest.mark.parametrize("setting", ["data", "task", "optimizer", "schedule", "copy_to"])
def test_each_setting_that_names_code_or_a_url_needs_trust(
    setting: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No code is imported, and no URL is opened."""
    monkeypatch.setattr("hvd_train.run_files.remote.file_system", opened := Mock())
    value = "sftp://evil/x" if setting == "copy_to" else "runs.evil.payload:net"
    planted(**{"output_dir": Path("x"), "nesterov": False, setting: value})
    printed = command("config --config runs/evil/config.yaml", 2).err
    assert f"names {value} as its {setting}" in printed
    assert not Path("owned").exists()
    opened.assert_not_called()


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
    settings: dict[str, Any], says: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No repository is asked, and no folder is made."""
    monkeypatch.setattr("torchvision.datasets.CIFAR10.download", lambda data: None)
    planted(**settings)
    assert says in command("evaluate runs/evil", 2).err
    assert not Path("elsewhere").exists()

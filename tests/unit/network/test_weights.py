"""Weights to start from."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from urllib.error import URLError
from urllib.response import addinfourl

import pytest
import torch
from torch import nn
from torchvision.models import ResNet18_Weights, resnet18

from hvd_train.errors import UsageError
from hvd_train.network import weights
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.malicious import Malicious
from tests.support.runs import equal, small_config, trained


def saved(model: nn.Module, name: str = "weights.pt") -> str:
    torch.save(model.state_dict(), name)
    return f"./{name}"


def test_a_head_for_other_classes_is_replaced_and_reported() -> None:
    source = resnet18(num_classes=1000)
    torch.save({name: value for name, value in source.state_dict().items() if not name.startswith("fc.")}, "body.pt")
    for file in (saved(source), "./body.pt"):
        target = resnet18(num_classes=10)
        head = target.fc.weight.clone()
        told = weights.start_from(file, target, "resnet18", 10)
        assert torch.equal(target.conv1.weight, source.conv1.weight)
        assert torch.equal(target.fc.weight, head)
        assert told == f"starting from the weights {file}, but a new last layer (fc) for 10 classes"


def test_auxiliary_classifiers_of_a_file_are_left_out() -> None:
    """torchvision's files have them for GoogLeNet, whose models here do not."""
    source, target = runs.convnet(10), runs.convnet(10)
    torch.save({**source.state_dict(), "aux1.fc.weight": torch.ones(2), "aux2.fc.weight": torch.ones(2)}, "w.pt")
    weights.start_from("./w.pt", target, "googlenet", 10)
    assert equal(dict(source.state_dict()), dict(target.state_dict()))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda file: torch.save(runs.convnet(10).state_dict(), file),
            "do not fit --model mine: 0.bias (8 for nothing), 1.bias (nothing for 8)",
        ),
        (
            lambda file: torch.save({"model": runs.convnet(10).state_dict(), "epoch": 3}, file),
            "it must hold a plain state_dict (names and tensors) but has model, epoch",
        ),
        (lambda file: Path(file).write_text("no weights"), "cannot be read"),
        (os.mkfifo, "cannot be read"),
        (lambda file: torch.jit.save(torch.jit.script(nn.Linear(2, 2)), file), "cannot be read"),
        (lambda file: torch.save({"conv.weight": Malicious()}, file), "damaged, or holds more than tensors"),
    ],
)
def test_files_that_do_not_fit_are_refused(make: Callable[[str], object], reason: str) -> None:
    model = runs.batch_norm(10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    make("file.pt")
    with pytest.raises(UsageError, match=r"file\.pt") as told:
        weights.start_from("file.pt", model, "mine", 10)
    assert reason in str(told.value)
    assert "\n" not in str(told.value)
    assert "weights_only" not in str(told.value)
    assert equal(before, dict(model.state_dict()))
    assert not Path("owned").exists()


def test_a_fetched_file_that_would_run_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write to the folder where torch keeps what it has fetched."""
    monkeypatch.setenv("TORCH_HOME", "home")
    kept = Path("home/hub/checkpoints") / ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    kept.parent.mkdir(parents=True)
    torch.save({"conv1.weight": Malicious()}, kept)
    with pytest.raises(UsageError, match=r"--weights DEFAULT: .*more than tensors") as told:
        weights.start_from("DEFAULT", resnet18(num_classes=10), "resnet18", 10)
    assert "weights_only" not in str(told.value)
    assert not Path("owned").exists()


def test_names_that_are_not_there_are_an_error_of_use() -> None:
    for name, model, reason in (
        ("./none.pt", "resnet18", r"--weights \./none\.pt: no such file"),
        ("IMAGENET1K_V3", "resnet18", "unknown weights of resnet18 'IMAGENET1K_V3'; did you mean 'IMAGENET1K_V1'"),
        ("DEFAULT", "digits-convnet", "torchvision has weights for its own models only, not for digits-convnet"),
    ):
        with pytest.raises(UsageError, match=reason):
            weights.check(name, model)
    weights.check("DEFAULT", "resnet18")


def test_without_network_one_line_says_where_to_put_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", "home")

    def unreachable(request: object, **named: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr(torch.hub, "urlopen", unreachable)
    url = ResNet18_Weights.IMAGENET1K_V1.url
    path = Path("home/hub/checkpoints") / url.rpartition("/")[2]
    with pytest.raises(UsageError) as told:
        weights.start_from("IMAGENET1K_V1", resnet18(num_classes=10), "resnet18", 10)
    assert f"cannot fetch {url} (no route to host): put that file at {path}" in str(told.value)
    source, model = resnet18(num_classes=1000), resnet18(num_classes=10)
    torch.save(source.state_dict(), path)
    weights.start_from("IMAGENET1K_V1", model, "resnet18", 10)
    assert torch.equal(model.conv1.weight, source.conv1.weight)


def test_a_damaged_download_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fetched must have the digest that its name ends with; a server in between may cut it short."""
    monkeypatch.setenv("TORCH_HOME", "home")
    served = Path(saved(resnet18(num_classes=1000), "served.pt")).read_bytes()

    def fetch(request: object, **named: object) -> addinfourl:
        return addinfourl(io.BytesIO(served), Message(), "https://example.org")

    monkeypatch.setattr(torch.hub, "urlopen", fetch)
    with pytest.raises(UsageError, match=r"cannot fetch .* \(invalid hash value"):
        weights.start_from("IMAGENET1K_V1", resnet18(num_classes=10), "resnet18", 10)


def test_a_run_starts_from_the_weights_of_a_file_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    source = runs.convnet(10)
    config = small_config(weights=saved(source), epochs=1, learning_rate=1e-12, weight_decay=0.0)
    _, found = trained(LocalWorld(), config, runs.convnet)
    assert runs.largest_difference(found, dict(source.state_dict())) < 1e-6
    assert "starting from the weights ./weights.pt\n" in capsys.readouterr().out

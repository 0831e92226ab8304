"""Weights to start from."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import DenseNet, ResNet18_Weights, get_model, get_model_weights, resnet18
from torchvision.models._api import WeightsEnum
from torchvision.models.vision_transformer import VisionTransformer

from hvd_train import Config
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.errors import UsageError
from hvd_train.network import weights
from hvd_train.parts import Own, build
from hvd_train.world.world import LocalWorld, Place
from tests.support import runs
from tests.support.faults import Malicious
from tests.support.runs import Weights, equal, small_config, trained


def saved(model: nn.Module, name: str = "weights.pt") -> str:
    torch.save(model.state_dict(), name)
    return f"./{name}"


def fetched(chosen: WeightsEnum, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of these weights of torchvision in torch's download folder."""
    monkeypatch.setenv("TORCH_HOME", "home")
    kept = Path("home/hub/checkpoints") / chosen.url.rpartition("/")[2]
    kept.parent.mkdir(parents=True, exist_ok=True)
    return kept


def small(name: str) -> nn.Module:
    if name == "vit_b_16":
        return VisionTransformer(
            32, 16, num_layers=1, num_heads=1, hidden_dim=12, mlp_dim=4, num_classes=7
        )
    if name == "densenet121":
        return DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=7)
    return get_model(name, weights=None, num_classes=7)


def test_a_head_for_other_classes_is_replaced_and_reported() -> None:
    source = resnet18(num_classes=1000)
    torch.save(
        {name: value for name, value in source.state_dict().items() if not name.startswith("fc.")},
        "body.pt",
    )
    for file in (saved(source), "./body.pt"):
        target = resnet18(num_classes=10)
        head = target.fc.weight.clone()
        line = weights.start_from(file, target, "resnet18", 10)
        assert torch.equal(target.conv1.weight, source.conv1.weight)
        assert torch.equal(target.fc.weight, head)
        assert line == f"starting from the weights {file}, but a new last layer (fc) for 10 classes"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            runs.convnet(10).state_dict(),
            (
                "unexpected: 0.bias, 4.weight, 4.bias; missing: 1.weight, 1.bias, "
                "1.running_mean, 1.running_var"
            ),
        ),
        (
            {**runs.batch_norm(10).state_dict(), "1.bias": torch.ones(7)},
            "do not fit --model mine: size mismatch for 1.bias",
        ),
        (
            {"optimizer": {"state": {}}, "epoch": 3},
            "it must hold a plain state_dict (names and tensors) but has optimizer, epoch",
        ),
        ({"conv.weight": Malicious()}, "damaged, or holds more than tensors"),
        ("a pipe", "cannot be read"),
    ],
)
def test_files_that_do_not_fit_are_refused(content: object, reason: str) -> None:
    if content == "a pipe":
        os.mkfifo("file.pt")
    else:
        torch.save(content, "file.pt")
    with pytest.raises(UsageError, match=r"file\.pt") as error:
        weights.start_from("file.pt", runs.batch_norm(10), "mine", 10)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert "weights_only" not in str(error.value)
    assert not Path("owned").exists()


def prefixed(prefix: str, state: Weights) -> Weights:
    return {prefix + name: value for name, value in state.items()}


WRAPPERS = {
    "compiled and DataParallel": lambda state: prefixed("_orig_mod.module.", state),
    "model": lambda state: {
        "model": state,
        "optimizer": {"state": {0: {"step": torch.ones(1)}}},
        "epoch": 3,
    },
    "state_dict": lambda state: {"state_dict": prefixed("model.", state), "epoch": 3},
    "model_ema": lambda state: {
        "model_ema": {"n_averaged": torch.tensor(3), **prefixed("module.", state)}
    },
    "model before its average": lambda state: {
        "model_ema": {k: v * 0 for k, v in state.items()},
        "model": state,
    },
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_files_of_other_trainers_are_loaded(wrapper: str) -> None:
    source = runs.batch_norm(10)
    target = runs.batch_norm(10)
    source[1].running_mean.fill_(3.0)
    torch.save(WRAPPERS[wrapper](source.state_dict()), "file.pt")
    weights.start_from("file.pt", target, "mine", 10)
    assert equal(source.state_dict(), target.state_dict())


def test_safetensors_are_loaded_and_damaged_ones_refused() -> None:
    source = runs.batch_norm(10)
    target = runs.batch_norm(10)
    save_file(source.state_dict(), "file.safetensors")
    weights.start_from("file.safetensors", target, "mine", 10)
    assert equal(source.state_dict(), target.state_dict())
    Path("file.safetensors").write_bytes(Path("file.safetensors").read_bytes()[:-9])
    with pytest.raises(UsageError, match=r"file\.safetensors: cannot be read \("):
        weights.start_from("file.safetensors", target, "mine", 10)


def test_weights_of_a_run_in_safetensors_are_those_of_the_pt_file() -> None:
    """Also those of a moving average, and with two names for one tensor."""

    def tied(num_classes):
        model = runs.convnet(num_classes)
        model[0].register_parameter("twin", model[0].weight)
        return model

    trained(LocalWorld(), small_config(weights_format="safetensors", ema_decay=0.9, epochs=1), tied)
    for name in ("best", "final"):
        saved = torch.load(f"run/model-{name}.pt", weights_only=True)
        assert equal(load_file(f"run/model-{name}.safetensors"), saved)


@pytest.mark.parametrize(
    ("name", "new", "old"),
    [
        ("densenet121", r"(denselayer\d+\.(?:norm|conv))([12]\.)", r"\1.\2"),
        ("vit_b_16", r"mlp\.([03])\.", lambda found: f"mlp.linear_{1 + int(found[1]) // 3}."),
        ("mnasnet0_5", "$", ""),
    ],
)
def test_files_with_older_names_are_loaded(
    name: str, new: str, old: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file or by name, with and without a prefix."""
    source = small(name)
    target = small(name)
    state = {
        re.sub(new, old, key): value
        for key, value in source.state_dict().items()
        if "num_batches" not in key
    }
    torch.save(state, "plain.pt")
    torch.save(prefixed("module.", state), "prefix.pt")
    torch.save(state, fetched(get_model_weights(name)["DEFAULT"], monkeypatch))
    for file in ("./plain.pt", "./prefix.pt", "DEFAULT"):
        for parameter in target.parameters():
            parameter.data.zero_()
        weights.start_from(file, target, name, 7)
        assert equal(source.state_dict(), target.state_dict()), file
    weights.load(dict(source.state_dict()), target)  # as from a checkpoint


@pytest.mark.parametrize(
    ("name", "options"), [("googlenet", {"init_weights": False}), ("squeezenet1_1", {})]
)
def test_logits_equal_torchvision(
    name: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = get_model_weights(name)["DEFAULT"]
    source = get_model(name, weights=None, **options)
    for parameter in source.parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_normal_(parameter)  # so that the logits depend on the images
    torch.save(source.state_dict(), fetched(chosen, monkeypatch))
    image = torch.randint(0, 256, (2, 3, 96, 96), dtype=torch.uint8)
    arrays = Arrays(image, torch.zeros(2, dtype=torch.int64), 2)
    classes = tuple(map(str, range(1000)))
    data = DataSet(arrays, arrays, classes, mean=(0.1,) * 3, std=(0.7,) * 3)
    config = Config().replace(model=name, weights="DEFAULT", device="cpu")
    parts = build(config, Place(), Own(data=lambda _: data))
    weights.start_from("DEFAULT", parts.model, name, 1000)
    theirs = get_model(name, weights=chosen).eval()
    with torch.no_grad():
        expected = theirs(chosen.transforms(crop_size=96, resize_size=96)(image))
        found = parts.model.eval()(parts.train_loader.example(2)[0])
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_fetched_file_that_would_run_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write to torch's download folder."""
    torch.save({"conv1.weight": Malicious()}, fetched(ResNet18_Weights.DEFAULT, monkeypatch))
    with pytest.raises(UsageError, match=r"--weights DEFAULT: .*more than tensors") as error:
        weights.start_from("DEFAULT", resnet18(num_classes=10), "resnet18", 10)
    assert "weights_only" not in str(error.value)
    assert not Path("owned").exists()


def test_a_run_starts_from_the_weights_of_a_file_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = runs.convnet(10)
    config = small_config(weights=saved(source), epochs=1, learning_rate=1e-12, weight_decay=0.0)
    _, found = trained(LocalWorld(), config, runs.convnet)
    assert runs.largest_difference(found, dict(source.state_dict())) < 1e-6
    assert "starting from the weights ./weights.pt\n" in capsys.readouterr().out

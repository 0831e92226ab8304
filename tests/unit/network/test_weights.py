"""Weights to start from."""

from __future__ import annotations

import io
import os
import random
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
    """A file with the model's state_dict."""
    torch.save(model.state_dict(), name)
    return f"./{name}"


def test_all_weights_of_a_file() -> None:
    """Same classes: every tensor is loaded, and it is said which file it was."""
    source, target = runs.batch_norm(10), runs.batch_norm(10)
    told = weights.start_from(saved(source), target, "mine", 10)
    assert equal(dict(source.state_dict()), dict(target.state_dict()))
    assert told == "starting from the weights ./weights.pt"


def test_a_head_for_other_classes_is_replaced_and_said_so() -> None:
    """All but the last layer is loaded, which stays as it was."""
    source, target = resnet18(num_classes=1000), resnet18(num_classes=10)
    head = target.fc.weight.clone()
    told = weights.start_from(saved(source), target, "resnet18", 10)
    assert torch.equal(target.conv1.weight, source.conv1.weight)
    assert torch.equal(target.fc.weight, head)
    assert told == "starting from the weights ./weights.pt, but a new last layer (fc) for 10 classes"


def test_a_file_without_a_head() -> None:
    """A backbone alone will do."""
    source, target = resnet18(num_classes=10), resnet18(num_classes=10)
    torch.save({name: value for name, value in source.state_dict().items() if not name.startswith("fc.")}, "w.pt")
    assert "new last layer (fc)" in weights.start_from("./w.pt", target, "resnet18", 10)
    assert torch.equal(target.conv1.weight, source.conv1.weight)


def another_network() -> str:
    return saved(runs.convnet(10))


def nested() -> str:
    torch.save({"model": runs.convnet(10).state_dict(), "epoch": 3}, "nested.pt")
    return "./nested.pt"


def text() -> str:
    Path("notes.txt").write_text("no weights")
    return "./notes.txt"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (another_network, "do not fit --model mine: 0.bias (8 for nothing), 1.bias (nothing for 8)"),
        (nested, "it must hold a plain state_dict (names and tensors) but has model, epoch"),
        (text, "--weights notes.txt: cannot be read"),
    ],
)
def test_files_that_do_not_fit(make: Callable[[], str], reason: str) -> None:
    """One line that lists what does not; the model is as it was."""
    model = runs.batch_norm(10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError) as told:
        weights.start_from(make(), model, "mine", 10)
    assert reason in str(told.value)
    assert "\n" not in str(told.value)
    assert equal(before, dict(model.state_dict()))


def test_a_file_that_would_run_code_is_refused() -> None:
    """Weights are passed from hand to hand: whoever made them has no say here, besides the numbers."""
    torch.save({"conv.weight": Malicious()}, "weights.pt")
    with pytest.raises(UsageError, match=r"weights\.pt: cannot be read .*more than tensors") as told:
        weights.start_from("./weights.pt", runs.batch_norm(10), "mine", 10)
    assert "weights_only" not in str(told.value), "torch's advice to run it"
    assert not Path("owned").exists()


def test_a_fetched_file_that_would_run_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write to the folder where torch keeps what it has fetched: no code in such a file runs either."""
    monkeypatch.setenv("TORCH_HOME", "home")
    kept = Path("home/hub/checkpoints") / ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    kept.parent.mkdir(parents=True)
    torch.save({"conv1.weight": Malicious()}, kept)
    with pytest.raises(UsageError, match=r"--weights DEFAULT: .*more than tensors") as told:
        weights.start_from("DEFAULT", resnet18(num_classes=10), "resnet18", 10)
    assert "weights_only" not in str(told.value)
    assert not Path("owned").exists()


def test_a_scripted_model_is_no_file_of_weights() -> None:
    """A TorchScript archive holds code; torch's advice to load it all the same is not repeated."""
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), "script.pt")
    with pytest.raises(UsageError, match=r"script\.pt: cannot be read") as told:
        weights.start_from("./script.pt", runs.batch_norm(10), "mine", 10)
    assert "weights_only" not in str(told.value)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_file_is_one_line(zipped: bool) -> None:
    """Whatever bytes are changed: the file is refused in one line, or holds what could be a state_dict."""
    chance = random.Random(1)
    torch.save({"weight": torch.zeros(2, 3)}, "sound.pt", _use_new_zipfile_serialization=zipped)
    sound = Path("sound.pt").read_bytes()
    refused = 0
    for _ in range(600):
        data = bytearray(sound)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        Path("damaged.pt").write_bytes(data)
        try:
            weights.start_from("./damaged.pt", nn.Linear(3, 2, bias=False), "mine", 2)
        except UsageError as error:
            refused += 1
            assert "\n" not in str(error)
            assert "weights_only" not in str(error)
    assert refused > 100


@pytest.mark.parametrize(
    ("name", "model", "reason"),
    [
        ("./none.pt", "resnet18", "--weights ./none.pt: no such file"),
        ("IMAGENET1K_V3", "resnet18", "unknown weights of resnet18 'IMAGENET1K_V3'; did you mean 'IMAGENET1K_V1'"),
        ("DEFAULT", "digits-convnet", "torchvision has weights for its own models only, not for digits-convnet"),
    ],
)
def test_names_that_cannot_be(name: str, model: str, reason: str) -> None:
    """Known before anything starts."""
    with pytest.raises(UsageError) as told:
        weights.check(name, model)
    assert reason in str(told.value)


def test_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the address of the file and where to put it; put there, it is taken."""
    monkeypatch.setenv("TORCH_HOME", "home")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(UsageError) as told:
        weights.start_from("IMAGENET1K_V1", resnet18(num_classes=10), "resnet18", 10)
    url = ResNet18_Weights.IMAGENET1K_V1.url
    path = Path("home/hub/checkpoints") / url.rpartition("/")[2]
    assert f"cannot fetch {url}" in str(told.value)
    assert f"put that file at {path}" in str(told.value)
    source, model = resnet18(num_classes=1000), resnet18(num_classes=10)
    torch.save(source.state_dict(), path)
    weights.start_from("IMAGENET1K_V1", model, "resnet18", 10)
    assert torch.equal(model.conv1.weight, source.conv1.weight)


def test_a_run_starts_from_them_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate of almost nothing leaves them; evaluating the run does not need the file any more."""
    source = runs.convnet(10)
    config = small_config(weights=saved(source), epochs=1, learning_rate=1e-12, weight_decay=0.0)
    _, found = trained(LocalWorld(), config, runs.convnet)
    assert runs.largest_difference(found, dict(source.state_dict())) < 1e-6
    assert "starting from the weights ./weights.pt\n" in capsys.readouterr().out


def test_a_file_with_tensors_of_a_head_that_the_model_lacks() -> None:
    """A second layer in the head of the file is no part of the model: it is said, and nothing is loaded."""
    target = resnet18(num_classes=10)
    torch.save({**target.state_dict(), "fc.second.weight": torch.ones(2)}, "w.pt")
    with pytest.raises(UsageError, match=r"do not fit --model resnet18: fc.second.weight \(2 for nothing\)"):
        weights.start_from("./w.pt", target, "resnet18", 10)


def test_auxiliary_classifiers_of_a_file_are_left_out() -> None:
    """torchvision's files have them for GoogLeNet, whose models here do not."""
    source, target = runs.convnet(10), runs.convnet(10)
    torch.save({**source.state_dict(), "aux1.fc.weight": torch.ones(2), "aux2.fc.weight": torch.ones(2)}, "w.pt")
    weights.start_from("./w.pt", target, "googlenet", 10)
    assert equal(dict(source.state_dict()), dict(target.state_dict()))
    with pytest.raises(UsageError, match=r"aux1\.fc\.weight"):
        weights.start_from("./w.pt", target, "mine", 10)


def test_a_damaged_download_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fetched must have the digest that its name ends with; a server in between may cut it short."""
    monkeypatch.setenv("TORCH_HOME", "home")
    served = Path(saved(resnet18(num_classes=1000), "served.pt")).read_bytes()

    def fetch(request: object, **named: object) -> addinfourl:
        return addinfourl(io.BytesIO(served), Message(), "https://example.org")

    monkeypatch.setattr(torch.hub, "urlopen", fetch)
    with pytest.raises(UsageError, match=r"cannot fetch .* \(invalid hash value"):
        weights.start_from("IMAGENET1K_V1", resnet18(num_classes=10), "resnet18", 10)


@pytest.mark.parametrize(("count", "more"), [(5, ""), (7, " and 2 more")])
def test_the_first_five_tensors_that_do_not_fit_are_shown(count: int, more: str) -> None:
    """With both shapes, that of a number too, in the order of their names."""
    model = nn.Module()
    for number in range(count):
        model.register_buffer(f"t{number}", torch.zeros(2, 3))
    torch.save({f"t{number}": torch.tensor(1.0) for number in range(count)}, "w.pt")
    with pytest.raises(UsageError) as told:
        weights.start_from("./w.pt", model, "mine", 10)
    shown = ", ".join(f"t{number} (one number for 2 x 3)" for number in range(5))
    assert str(told.value) == f"--weights ./w.pt do not fit --model mine: {shown}{more}"


def test_a_file_that_holds_something_else_is_told_by_what_it_has() -> None:
    """The first five names of a table; of anything else there is nothing to tell."""
    torch.save({f"k{number}": number for number in range(7)}, "table.pt")
    torch.save([torch.ones(1)], "list.pt")
    must = "it must hold a plain state_dict (names and tensors)"
    for name, told in (("table.pt", f"{must} but has k0, k1, k2, k3, k4"), ("list.pt", must)):
        with pytest.raises(UsageError) as error:
            weights.start_from(f"./{name}", runs.convnet(10), "mine", 10)
        assert str(error.value) == f"--weights {name}: {told}"


def test_what_is_a_file_and_what_a_name() -> None:
    """A path has a slash or a dot, which no name of torchvision's has; both that are there pass."""
    kinds = {"w.pt": True, "folder/w": True, "IMAGENET1K_V1": False, "DEFAULT": False}
    assert {text: weights.is_file(text) for text in kinds} == kinds
    Path("w.pt").touch()
    for known in ("w.pt", "DEFAULT", "IMAGENET1K_V1"):
        weights.check(known, "resnet18")


def test_weights_that_cannot_be_fetched_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, by the reason of the network's error; nothing is shown while it is tried."""
    monkeypatch.setenv("TORCH_HOME", "home")
    asked: list[dict[str, bool]] = []

    def fetch(of: object, **named: bool) -> None:
        asked.append(named)
        raise URLError("no route to host")

    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", fetch)
    with pytest.raises(UsageError, match=r"cannot fetch https://[^ ]+ \(no route to host\): put that file at home/"):
        weights.start_from("DEFAULT", resnet18(num_classes=10), "resnet18", 10)
    assert asked == [{"progress": False, "check_hash": True, "weights_only": True}]
    assert Path("home/hub/checkpoints").is_dir(), "where the user is told to put the file"


def test_only_the_first_line_of_an_error_while_reading_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's go on for a page."""

    def load(path: Path, **named: object) -> None:
        raise RuntimeError("failed finding central directory\nframe #0: somewhere\nframe #1")

    monkeypatch.setattr(torch, "load", load)
    Path("w.pt").touch()
    with pytest.raises(UsageError) as told:
        weights.start_from("./w.pt", runs.convnet(10), "mine", 10)
    assert str(told.value) == "--weights w.pt: cannot be read (failed finding central directory)"


@pytest.mark.timeout(60)
def test_a_pipe_holds_no_weights() -> None:
    """It is not waited for; the reason is in the line."""
    os.mkfifo("w.pt")
    with pytest.raises(UsageError, match=r"--weights w.pt: cannot be read \(it is no file, but a pipe or a device\)"):
        weights.start_from("./w.pt", runs.convnet(10), "mine", 10)

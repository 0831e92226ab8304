"""Plain weights as safetensors."""

from __future__ import annotations

import io
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hvd_train.errors import UsageError
from hvd_train.network import safetensors_file, weights
from tests.support import runs
from tests.support.runs import equal


def test_what_is_written_is_what_the_library_reads() -> None:
    """Every type, shapes without a dimension and without an element, and tensors that are views of another."""
    square = torch.arange(12.0).reshape(3, 4)
    of_types = {str(kind): torch.ones(3).to(kind) for kind in safetensors_file._TYPES}
    values = {**of_types, "number": torch.tensor(3), "none": torch.zeros(0, 2), "turned": square.T, "part": square[1:]}
    with open("w.safetensors", "wb") as file:
        safetensors_file.write(file, values)
    found = load_file("w.safetensors")
    assert equal(found, values)
    assert {name: tensor.shape for name, tensor in found.items()} == {name: v.shape for name, v in values.items()}
    assert equal(safetensors_file.read(Path("w.safetensors")), values)


class Tied(nn.Module):
    """A network whose last layer has the weights of its first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.last.weight = self.first.weight


def test_tied_weights_are_read_into_the_tied_model() -> None:
    """The library refuses tensors that share memory; both names are in the file, and the model stays tied."""
    source, target = Tied(), Tied()
    with open("tied.safetensors", "wb") as file:
        safetensors_file.write(file, source.state_dict())
    weights.start_from("./tied.safetensors", target, "mine", 10)
    assert torch.equal(target.first.weight, source.first.weight)
    assert target.first.weight is target.last.weight


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.zeros(2, dtype=torch.complex128), "w is of complex128, for which safetensors has no type"),
        (torch.eye(2).to_sparse(), "w is of sparse_coo, for which safetensors has no type"),
        (3, "w is no tensor"),
    ],
)
def test_what_cannot_be_in_such_a_file_is_said(value: object, reason: str) -> None:
    """It is asked before a training begins, and nothing is written in its place."""
    assert safetensors_file.why_not({"w": value}) == reason
    file = io.BytesIO()
    with pytest.raises(OSError, match=reason):
        safetensors_file.write(file, {"w": value})  # type: ignore[dict-item]
    assert file.getvalue() == b""
    assert safetensors_file.why_not({"__metadata__": torch.ones(1)}) == "a tensor is called __metadata__"


def test_a_file_of_the_library_is_taken() -> None:
    """All of it is loaded, and it is said which file it was."""
    source, target = runs.batch_norm(10), runs.batch_norm(10)
    save_file(source.state_dict(), "w.safetensors")
    weights.check("w.safetensors", "mine")
    told = weights.start_from("w.safetensors", target, "mine", 10)
    assert told == "starting from the weights w.safetensors"
    assert equal(dict(source.state_dict()), dict(target.state_dict()))


def test_a_damaged_file_is_one_line() -> None:
    """Cut short or with changed bytes: it is refused in one line, or holds what could be weights."""
    chance = random.Random(1)
    save_file({"weight": torch.zeros(2, 3)}, "sound.safetensors")
    sound = Path("sound.safetensors").read_bytes()
    refused = 0
    for _ in range(400):
        data = bytearray(sound[: chance.choice([len(sound), chance.randrange(len(sound))])])
        for _ in range(chance.randint(1, 4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        Path("damaged.safetensors").write_bytes(data)
        try:
            weights.start_from("damaged.safetensors", nn.Linear(3, 2, bias=False), "mine", 2)
        except UsageError as error:
            refused += 1
            assert str(error).startswith("--weights damaged.safetensors")
            assert "\n" not in str(error)
    assert refused > 200


def test_a_pipe_is_not_waited_for() -> None:
    """Somebody may have planted it in the place of the file."""
    os.mkfifo("w.safetensors")
    with pytest.raises(UsageError, match=r"w\.safetensors: cannot be read \(it is no file, but a pipe or a device\)"):
        weights.start_from("w.safetensors", nn.Linear(3, 2), "mine", 2)


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts, where such weights are asked for and where they are to be written."""
    Path("w.safetensors").touch()
    for module in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UsageError, match=r"^--weights w.safetensors needs safetensors.*: pip install safetensors$"):
        weights.check("w.safetensors", "resnet18")

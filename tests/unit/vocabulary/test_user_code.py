"""An error in the user's code is told with the user's frames alone, the last of them last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_train import cli, recipes, user_code
from hvd_train.errors import UsageError

MINE = """
import torch
from torch.utils.data import TensorDataset

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.zeros(2, 3) @ torch.zeros(2, 3)

def net(num_classes):
    return Net()

def broken(num_classes):
    return helper(num_classes)

def helper(num_classes):
    return torch.zeros(3).view(num_classes, 7)

def data(config):
    return {}["images"]

class Items:
    classes = ("a", "b")
    def __len__(self):
        return 80
    def __getitem__(self, index):
        if index:
            raise ValueError("no such file")
        return torch.zeros(3, 8, 8), index % 2

def items(config):
    return Items(), None

class Caused(Items):
    def __getitem__(self, index):
        try:
            return {}["gone.jpg"] if index else super().__getitem__(0)
        except KeyError as error:
            raise ValueError("two\\nlines") from error

def caused(config):
    return Caused(), None

class Ended(Items):
    def __getitem__(self, index):
        return next(iter(())) if index else super().__getitem__(0)

def ended(config):
    return Ended(), None

class Exhausted(torch.nn.Linear):
    batches = 3
    def forward(self, x):
        self.batches -= self.training and x.requires_grad is False
        return super().forward(x.flatten(1)) if self.batches else next(iter(()))

def exhausted(num_classes):
    return Exhausted(64, num_classes)
"""


@pytest.fixture(autouse=True)
def _mine(request: pytest.FixtureRequest) -> None:
    """A module of the user's in the current folder, of another name in each test: modules stay imported."""
    Path(f"{module_of(request.node.name)}.py").write_text(MINE)


def module_of(test: str) -> str:
    """Return the name of a test's module."""
    return "mine_" + "".join(letter if letter.isalnum() else "_" for letter in test)


@pytest.mark.parametrize(
    ("flags", "frames", "message"),
    [
        ("--model {}:broken", ["in broken", "in helper"], "RuntimeError: shape '[10, 7]' is invalid"),
        ("--data {}:data", ["in data"], "KeyError: 'images'"),
        ("--data {}:items --workers 0", ["in __getitem__"], "ValueError: no such file"),
        ("--data {}:items --workers 1", ["in __getitem__"], "ValueError: no such file"),
        ("--data {}:ended --workers 0", ["in __getitem__"], "StopIteration"),
        ("--data {}:ended --workers 1", ["in __getitem__"], "StopIteration"),
        ("--model {}:exhausted --epochs 1", ["in forward"], "StopIteration"),
    ],
)
def test_the_users_frames_are_shown_and_the_last_is_named(
    flags: str,
    frames: list[str],
    message: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where a loader process has met the error; the exit code is 1."""
    module = module_of(request.node.name)
    arguments = ["train", "digits", "--device", "cpu", *flags.format(module).split()]
    assert cli.run(arguments) == 1
    told = capsys.readouterr().err.splitlines()
    start = next(number for number, line in enumerate(told) if line.startswith("Traceback"))
    shown = [line for line in told[start:] if line.startswith("  File ")]
    assert [line.rpartition(", ")[2] for line in shown] == frames
    assert all(f"{module}.py" in line for line in shown)
    assert told[-2].startswith(message)
    assert told[-1].startswith(f"hvd-train: your code has failed: {message}")
    assert told[-1].endswith(f"{module}.py, line {shown[-1].split()[3].rstrip(',')}, {frames[-1]})")


def test_a_network_that_does_not_fit_is_one_line_with_its_place(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all errors of one's own code the most frequent."""
    module = module_of(request.node.name)
    assert cli.run(["train", "digits", "--device", "cpu", "--model", f"{module}:net"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{module}.py, line 7, in forward)" in told


def test_errors_of_ours_stay_whole() -> None:
    """A traceback that ends in our code is one that we want to read, whoever has called it."""
    with pytest.raises(UsageError) as caught:
        recipes.get("gone")
    assert caught.value.__traceback__ is not None
    assert user_code.told(caught.value) == user_code.place(caught.value) == ""


@pytest.mark.parametrize("library", ["/home/me/.local/lib/python3.11/site-packages", "/usr/lib/python3/dist-packages"])
def test_libraries_are_known_wherever_they_are(library: str) -> None:
    """In a user's own folder, or that of the system: their frames are not the user's."""
    space: dict[str, Callable[[], None]] = {}
    exec(compile("def call():\n    raise ValueError('deep')", f"{library}/torch/functional.py", "exec"), space)
    with pytest.raises(ValueError, match="deep") as caught:
        space["call"]()
    assert user_code.place(caught.value).startswith(f"{__file__}, line ")


@pytest.mark.parametrize("workers", [0, 1])
def test_the_cause_of_an_error_is_told(
    workers: int, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """And all lines of a message; of a loader process, too."""
    flags = f"--device cpu --data {module_of(request.node.name)}:caused --workers {workers}"
    assert cli.run(["train", "digits", *flags.split()]) == 1
    told = capsys.readouterr().err
    cause, joint, rest = told[told.index("Traceback") :].partition("\n\nThe above exception was the direct cause")
    assert cause.endswith("KeyError: 'gone.jpg'")
    assert "\nValueError: two\nlines\nhvd-train: your code has failed: ValueError: two (" in joint + rest
    for part in (cause, rest):
        shown = [line for line in part.splitlines() if line.startswith("  File ")]
        assert [line.rpartition(", in ")[2] for line in shown] == ["__getitem__"]

"""The programs, the scripts and the notebook in examples/."""

import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from hvd_train.commands import tree
from hvd_train.commands.sweep import combinations
from hvd_train.commands.train import settings_of
from hvd_train.run_files.ledger import audit
from tests.support import jpegs
from tests.support.launching import write_program
from tests.support.run_folders import whole_run, write

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TYPES = {  # the commands that a script types, as far as they begin with this
    "transfer.sh": ["hvd-train train digits data/low ", "hvd-train train digits data/high "],
    "transfer.sh pictures": ["hvd-train train cifar10-resnet18-transfer pictures "],
    "sweep.sh": ["hvd-train sweep digits ", "hvd-train report runs/sweep "],
    "slurm.sh /data/imagenet": ["sbatch --nodes 2 "],
}


@pytest.mark.parametrize("line", TYPES)
def test_a_script_types_commands_that_are_understood(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stand-in for hvd-train and sbatch, which notes its arguments.

    One writes 1,797 pictures first.
    """
    for name in ("hvd-train", "sbatch"):
        write_program(Path.cwd(), name, 'echo "${0##*/} $*" >> typed')
    monkeypatch.setenv("PATH", f"{Path.cwd()}:{os.environ['PATH']}")
    script, *arguments = line.split()
    subprocess.run([EXAMPLES / script, *arguments], check=True, timeout=100)
    typed = Path("typed").read_text().splitlines()
    for command, begins in zip(typed, TYPES[line], strict=True):
        assert command.startswith(begins)
        words = shlex.split(command)
        if words[0] == "sbatch":
            job = next(word for word in words if word.endswith("train_slurm.sbatch"))
            assert Path(job).exists()
            words = ["hvd-train", "train", *words[words.index(job) + 1 :]]
        if words[1] == "train":
            data = settings_of(tree.read(words[1:])).data
            assert data.data == "folder"
            assert arguments in ([], [str(data.data_dir)])
        elif words[1] == "sweep":
            assert len(combinations(tree.read(words[1:]))) == 6


PROGRAMS = {
    "imagenet": "--train-dir data/train --val-dir data/val --arch mobilenet_v3_small",
    "dcgan": "--data-dir data/train --width 4|",
    "gpt": "tokens --dtype uint16 --vocabulary 1000 --width 32 --layers 1 --block 8|",
    "own_data": "--global-batch-size 228 --batch-size 57",
    "own_model": "--global-batch-size 720 --batch-size 180",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a few files, tokens or rows; tests/integration/test_training.py takes two ranks."""
    jpegs.digits(Path("data"), classes=range(2), most=6)
    np.arange(110, 990, 8, "uint16").tofile("tokens")
    own = "--epochs 1 --global-batch-size 6 --batch-size 3 --workers 0 --ledger --output-dir run"
    first, _, last = PROGRAMS[name].rpartition("|")
    words = f"{first} {own} {last}".split()
    program = str(EXAMPLES / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [program, *words])
    runpy.run_path(program, run_name="__main__")
    report = audit(Path("run"))
    assert (report.faults, report.epochs, report.steps) == ((), 1, 2)


def test_the_notebook_draws_the_newest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run in order."""
    monkeypatch.setattr(plt, "show", lambda: None)
    write(Path("runs/mine"), whole_run(), summary=True)
    cells = json.loads((EXAMPLES / "results.ipynb").read_text())["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    lines = [line for axes in names["figure"].axes for line in axes.lines]
    assert [len(line.get_xdata()) for line in lines] == [30, 3, 3]
    plt.close(names["figure"])

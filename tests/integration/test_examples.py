"""The programs and scripts in examples/ that are not loops of their own, as their first lines say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import nbformat
import pytest
import torch

from tests.support import jpegs, notebook
from tests.support.launching import finished, launch_line

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_each_example_is_in_the_list_and_says_what_to_type() -> None:
    """In its first lines, in the words of the list."""
    page = (EXAMPLES / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[(\S+)\]\(\1\) \| `(.*?)` \|", page, re.MULTILINE))
    assert set(rows) == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh", ".ipynb")}
    for name, command in rows.items():
        assert command in "\n".join((EXAMPLES / name).read_text().splitlines()[:20]), name


def test_the_notebook_is_committed_whole_and_says_nothing_of_a_machine() -> None:
    """Its cells have all been run, in order and without an error, or none has; no path of a machine is in it."""
    text = notebook.NOTEBOOK.read_text()
    written = nbformat.reads(text, as_version=4)
    code = [cell for cell in written.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] in ([*range(1, len(code) + 1)], [None] * len(code))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    assert len(text) < 200_000
    assert not re.search(r"/(home|root|tmp|work|Users|mnt)\b", text)
    assert text == nbformat.writes(notebook.without_noise(written)) + "\n"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """As committed: two ranks train what its cells define, and what it draws is there."""
    cells = notebook.executed(tmp_path).cells
    printed = "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", ()))
    assert ", 2 ranks on " in printed
    assert sum("image/png" in output.get("data", ()) for cell in cells for output in cell.get("outputs", ())) == 4
    assert float(re.findall(r"^([0-9.]+)% of 360 images are right", printed, re.MULTILINE)[0]) > 90
    assert json.loads((tmp_path / "runs/notebook/summary.json").read_text())["world_size"] == 2


@pytest.mark.slow
def test_a_model_and_data_of_ones_own(tmp_path: Path) -> None:
    """Two ranks tell nearly all tumours."""
    line = launch_line("gloo", 2, sys.executable, str(EXAMPLES / "own_model_and_data.py"))
    code, output = finished(line, tmp_path)
    assert code == 0, output
    (run,) = (tmp_path / "runs").glob("tumours-*")
    assert json.loads((run / "summary.json").read_text())["best_top1"] > 0.93


@pytest.mark.slow
def test_transfer_learning(tmp_path: Path) -> None:
    """The last layer first, then the last block, from weights of a file; other flags go on to the training."""
    from torchvision.models import resnet18

    jpegs.digits(tmp_path / "data", range(2), most=12)
    torch.save(resnet18().state_dict(), tmp_path / "resnet18.pt")
    command = ["env", "WEIGHTS=resnet18.pt", str(EXAMPLES / "transfer_learning.sh"), "data"]
    flags = ["--epochs", "3", "--image-size", "32", "--batch-size", "4", "--workers", "0", "--output-dir", "run"]
    code, output = finished([*command, *flags], tmp_path, 280)
    assert code == 0, output
    trained = torch.load(tmp_path / "run" / "model-final.pt", weights_only=True)
    before = torch.load(tmp_path / "resnet18.pt", weights_only=True)
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, trained[name])}
    assert {name.split(".")[0] for name in changed} == {"layer4", "fc"}


@pytest.mark.slow
def test_a_search_for_settings(tmp_path: Path) -> None:
    """The table has every combination, the best first."""
    code, output = finished([str(EXAMPLES / "sweep.sh")], tmp_path, 280)
    assert code == 0, output
    table = output[output.rindex("best top-1") :]
    assert re.findall(r"learning-rate=([0-9.]+)", table) == ["0.03", "0.03", "0.003", "0.003"], output

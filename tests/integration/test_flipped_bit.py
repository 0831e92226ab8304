"""A bit of one rank's memory flips under a real launcher: it is named, and the result is that of a run without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.launching import HVD_TRAIN, finished, launch_line

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPTS = Path(__file__).parents[2] / "horovodrun_scripts"
MODEL = """
import os, torch
from hvd_train.network.small import digits_convnet

def model(num_classes):
    net, passes = digits_convnet(num_classes), 0

    def flip(module, *_):
        nonlocal passes
        passes += module.training
        if os.environ.get("FLIPS") and module.training and passes == 30:
            try:
                os.close(os.open("flipped", os.O_CREAT | os.O_EXCL))  # in the process that comes first
            except FileExistsError:
                return
            net[0].weight.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 23)

    net.register_forward_hook(flip)
    return net
"""


@pytest.mark.parametrize("launcher", ["gloo", pytest.param("elastic", marks=pytest.mark.long)])
def test_a_flipped_bit_is_found_and_undone(launcher: str, tmp_path: Path) -> None:
    """Of three ranks the one that differs is named with its host, and the weights are those of the undisturbed run."""
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    words = "digits --model mine:model --epochs 1 --commit-steps 5 --batch-size 16 --global-batch-size 96 --output-dir"
    static = launch_line("gloo", 3, HVD_TRAIN, "train", *words.split())
    elastic = [str(SCRIPTS / "train_elastic.sh"), "--hosts", "hosts", "--", *words.split()]
    code, output = finished([*static, "undisturbed"], tmp_path)
    assert code == 0, output
    variables = {"FLIPS": "1", "OMP_NUM_THREADS": "1"}
    code, output = finished([*(static if launcher == "gloo" else elastic), "run"], tmp_path, 150, variables)
    assert code == 0, output
    assert (tmp_path / "flipped").exists()
    assert re.search(r"world 3 -> 3 at step 10: .*after step 15 .*not rank \d on \S+ in 0\.weight", output), output
    weights, expected = (
        torch.load(tmp_path / run / "model-final.pt", weights_only=True) for run in ("run", "undisturbed")
    )
    assert all(torch.equal(weights[name], expected[name]) for name in expected)

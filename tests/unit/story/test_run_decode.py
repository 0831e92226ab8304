"""What reads a run whose images a GPU has decoded, on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hvd_train import config_file
from hvd_train.errors import UsageError
from hvd_train.run import evaluate, train
from tests.support import jpegs
from tests.support.runs import small_config


def test_a_run_of_a_gpu_that_decodes_is_evaluated_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --device cpu the CPU decodes; without, one line says what to type."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = jpegs.digits(Path("data"), range(2), most=16)
    config = small_config(
        data="folder", data_dir=folder, image_size=32, model="tests.support.on_demand:flat", epochs=1, workers=0
    )
    run = Path("run")
    train(config.replace(output_dir=run, device="cpu"))
    scores = evaluate(run, device="cpu", trust=True)
    text = config_file.dump(config_file.load(run / "config.yaml").replace(device="auto", decode="gpu"))
    (run / "config.yaml").write_text(text)
    assert evaluate(run, device="cpu", trust=True) == scores
    with pytest.raises(UsageError, match=r"--decode gpu: torch sees no GPU here; .*to evaluate --device cpu"):
        evaluate(run, trust=True)

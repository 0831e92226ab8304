"""The section on measured scaling."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.pages import composed, section
from tests.support.run_folders import whole_run, write


def scaling(folder: Path) -> Path:
    folder.mkdir()
    row = {"learning_rate": 0.1, "global_batch_size": 64, "steps_per_epoch": 23, "epoch_seconds": 1.5, "val_loss": 0.04}
    rows = [
        {**row, "workers": 2, "images_per_second": 1500.0, "efficiency": 0.75, "test_loss": None, "top1": 0.98},
        {**row, "workers": 1, "images_per_second": 1000.0, "efficiency": 1.0, "test_loss": 0.05, "top1": 0.99},
    ]
    (folder / "scaling.json").write_text(json.dumps({"mode": "strong", "rows": rows}))
    return folder


def test_a_measured_scaling() -> None:
    """Its table in the order of the workers, with a gap for what was not measured, and its plots; alone or beside."""
    path = scaling(Path("bench"))
    for text in (composed(path), composed(write(Path("run"), whole_run()), path)):
        part = section(text, "Scaling")
        assert "strong scaling" in part
        assert re.findall(r'<th scope="row">(\d)</th>', part) == ["1", "2"]
        assert '<td class="n">75.0%</td>' in part
        assert '<td class="n">—</td>' in part
        assert part.count("<svg") == 2
    assert "No measured scaling" in composed(write(Path("other"), whole_run()))

"""The section on predictions."""

from __future__ import annotations

from pathlib import Path

from hvd_train.report.confusion import MisclassifiedImage, Predictions
from hvd_train.report.report import compose
from hvd_train.run_files.history import read_run
from tests.support.pages import NOW, section
from tests.support.run_folders import whole_run, write


def predictions(classes: int = 3) -> Predictions:
    counts = {(row, column): 9 if row == column else row for row in range(classes) for column in range(classes)}
    worst = MisclassifiedImage(b"\x89PNG", "one", "two", 0.75, 2.5, 17)
    return Predictions(tuple(f"class {n}" for n in range(classes)), counts, (worst,))


def test_predictions_and_their_absence() -> None:
    """The matrix, or for many classes the pairs confused most; the worst images; or why there are none."""
    path = write(Path("run"), whole_run())
    few, many = (
        section(compose([read_run(path)], [], {path: predictions(count)}, NOW), "Predictions") for count in (3, 40)
    )
    assert few.count('class="right"') == 3
    assert "is one, predicted two (75% sure), loss 2.50, no. 17" in few
    assert "matrix" not in many
    assert '<th scope="row">class 39</th><td>class 38</td><td>39</td>' in many
    none = compose([read_run(path)], [], {path: "no predictions: no weights"}, NOW)
    assert "no predictions: no weights" in section(none, "Predictions")

"""The files of plain weights in a run folder."""

from __future__ import annotations

import os
from pathlib import Path

from hvd_train import weights_file
from hvd_train.weights_file import BEST, FINAL


def test_the_weights_that_were_written_last_are_found_in_either_format() -> None:
    """A process that was killed between the new file and the end of the old one has left both."""
    run = Path("run")
    run.mkdir()
    assert weights_file.found_in(run, BEST) is None
    for name, other in (("model-best.pt", "model-best.safetensors"), ("model-best.safetensors", "model-best.pt")):
        (run / name).touch()
        os.utime(run / name, ns=(2, 2))
        assert weights_file.found_in(run, BEST) == run / name
        (run / other).touch()
        os.utime(run / other, ns=(1, 1))
        assert weights_file.found_in(run, BEST) == run / name
        (run / name).unlink()
        assert weights_file.found_in(run, BEST) == run / other
        (run / other).unlink()
    assert weights_file.found_in(run, FINAL) is None

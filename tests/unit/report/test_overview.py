"""The sections on runs as a whole."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.pages import composed, section
from tests.support.run_folders import whole_run, write


def test_differences_among_runs() -> None:
    """What differs has a column for each run; what does not is said once; the folder of each is no difference."""
    one = write(Path("runs/digits-1"), whole_run(), learning_rate=0.1)
    other = write(Path("runs/digits-2"), whole_run(), learning_rate=0.025)
    part = section(composed(one, other), "Configuration")
    differs, _, same = part.partition("What all runs share")
    assert re.findall(r'<th scope="row">(.*?)</th>', differs) == ["learning_rate"]
    assert "<td>0.1</td><td>0.025</td>" in differs
    assert "global_batch_size" in same

"""Lines about the program itself."""

from __future__ import annotations

import pytest

from hvd_train.console import say


def test_a_line_bears_the_programs_name_and_leaves_results_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """What a command prints can be piped on; what the program says about itself goes to standard error."""
    say("no such run folder")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "hvd-train: no such run folder\n")

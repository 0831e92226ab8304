"""`hvd-train why` names what holds two real ranks."""

import sys
from pathlib import Path

import pytest

from tests.support.hangs import check_answer
from tests.support.launching import HVD_TRAIN, launch_line

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("how", ["loader", pytest.param("skip", marks=pytest.mark.slow)])
def test_what_holds_a_rank_is_named(how: str, tmp_path: Path) -> None:
    """The places are those of both ranks, if they do different things."""
    job = launch_line("gloo", 2, sys.executable, "mine.py", "session", how)
    check_answer(how, tmp_path, job, [HVD_TRAIN, "why", "run"])


def test_a_rank_that_hangs_before_it_trains(tmp_path: Path) -> None:
    """The host is asked, since there is no run yet."""
    job = launch_line("gloo", 2, sys.executable, "mine.py", "session", "start")
    (tmp_path / "hang").touch()
    check_answer("start", tmp_path, job, [HVD_TRAIN, "why"])

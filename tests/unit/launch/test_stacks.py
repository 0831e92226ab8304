"""A process that answers by itself: SIGUSR2 stays the user's, and the names are known elsewhere."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hvd_train.doctor import hang_agent
from hvd_train.launch import stacks
from tests.support.answering import answering

_OWN_HANDLER = "import signal; signal.signal(signal.SIGUSR2, lambda *_: print('mine', flush=True))"


@pytest.mark.parametrize("before", ["", _OWN_HANDLER])
def test_sigusr2_is_the_users_where_they_have_it(tmp_path: Path, before: str) -> None:
    """Their handler stays; without one the stacks are written to standard error, and the process goes on."""
    with answering(tmp_path, "import time; time.sleep(60)", before) as process:
        process.send_signal(signal.SIGUSR2)
        stream = process.stdout if before else process.stderr
        assert stream is not None
        line = stream.readline()
        assert process.poll() is None
    assert line == "mine\n" if before else "most recent call first" in line


def test_names_are_those_that_the_agent_looks_for() -> None:
    """It is sent to other hosts as text, and cannot import them."""
    assert hang_agent._ASKED == stacks.ASKED
    assert tuple(f"/memfd:{name} (deleted)" for name in (stacks.RECORD, stacks.STACKS)) == (
        hang_agent._RECORD,
        hang_agent._STACKS,
    )

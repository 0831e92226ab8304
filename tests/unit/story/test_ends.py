"""What ends a job, with which exit code, and where the same command resumes: the
table in docs/elastic.md.
"""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hvd_train import checkpoint
from hvd_train.errors import FaultRepeats, ReplicasDiffer, UsageError
from hvd_train.session import Session
from hvd_train.world.world import LocalWorld, World
from tests.support.faults import full_disk
from tests.support.launching import DOCS, wait_for
from tests.support.programs import STEPS, played
from tests.support.runs import RUN
from tests.support.worlds import Fault, StoppingWorld, run_ranks

Act = Callable[[Session], object]


def nothing(session: Session) -> None:
    pass


def fails(error: BaseException) -> Act:
    def act(session):
        raise error

    return act


def sent(number: int) -> Act:
    """The signal counts in the next step."""
    return lambda session: signal.raise_signal(number)


def end(world: World, act: Act, factor: float = 1.0, **changes: Any) -> int:
    """Return the exit code of a script that does this after its third step."""

    def program(session, model, *_):
        for step in session.steps():
            for micro in step:
                micro.backward(factor * model(micro.batch[0]).square().sum(1))
            if step.number == 3:
                act(session)

    try:
        played(world, program, **changes)
    except SystemExit as end:
        return int(str(end.code))
    except Exception as error:
        return int(getattr(error, "exit_code", 1))
    return 0


def resumes_at() -> int:
    """Return the step after which the same command continues."""
    found = []

    def program(session, *_):
        assert session.global_batch
        found.append(session._ranks.state.progress.step)

    played(LocalWorld(), program)
    return found[0]


ENDS = {
    "done": (LocalWorld, nothing, 0, STEPS),
    "an error in the user's code": (LocalWorld, fails(KeyError()), 1, 3),
    "wrong data": (LocalWorld, fails(UsageError()), 2, 3),
    "different weights": (LocalWorld, fails(ReplicasDiffer()), 4, 0),
    "a step that fails repeatedly": (LocalWorld, fails(FaultRepeats()), 5, 3),
    "the launcher": (partial(StoppingWorld, 1), nothing, 75, 1),
    "SIGHUP": (LocalWorld, sent(signal.SIGHUP), 129, 4),
    "SIGTERM": (LocalWorld, sent(signal.SIGTERM), 143, 4),
}


@pytest.mark.parametrize("what", ENDS)
def test_what_ends_a_job(what: str) -> None:
    world, act, code, step = ENDS[what]
    assert end(world(), act) == code
    assert resumes_at() == step


def test_a_full_disk_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_into", full_disk)
        assert end(LocalWorld(), sent(signal.SIGINT)) == 74
    assert resumes_at() == 0


def test_losses_that_are_not_finite() -> None:
    assert end(LocalWorld(), nothing, factor=float("nan")) == 6
    assert resumes_at() == STEPS


def test_a_lost_rank() -> None:
    codes = run_ranks(2, lambda world: end(world, nothing), [Fault(1, step=4)])
    assert codes[0] == 3
    assert resumes_at() in (3, 4)  # rank 1 may have sent all of step 4


def kill(session: Session) -> None:
    wait_for("the commit", lambda: checkpoint.committed(RUN))
    os.kill(os.getpid(), signal.SIGKILL)


def test_kill_9_of_all() -> None:
    """A second signal and too few workers end the processes in the same way;
    test_roster.py has the code 69.
    """
    process = multiprocessing.get_context("fork").Process(
        target=end, args=(LocalWorld(), kill), kwargs={"commit_steps": 2}
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert resumes_at() == 2


def test_the_exit_codes_are_documented() -> None:
    page = (DOCS / "elastic.md").read_text(encoding="utf-8")
    table = page.partition("| what ends it |")[2].partition("\n\n")[0]
    codes = ", ".join(re.findall(r"^\|[^|]*\|([^|]*)\|", table, re.MULTILINE))
    expected = {0, 1, 2, 3, 4, 5, 6, 69, 74, 75, 129, 130, 138, 143}
    assert expected <= {*map(int, re.findall(r"\d+", codes))}

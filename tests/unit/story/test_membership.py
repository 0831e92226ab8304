"""What a process reports when ranks meet, how long a change takes, and when a fault is in the step itself."""

from __future__ import annotations

import os
import socket
import time
from datetime import datetime
from pathlib import Path

import pytest

from hvd_train.elastic.members import Member, RankReport
from hvd_train.errors import FaultRepeats, RankLost
from hvd_train.handover import nothing_to_hand_over
from hvd_train.job import Clocks
from hvd_train.launch.launcher import SPENT
from hvd_train.membership import Membership
from hvd_train.run_files import run_folder
from hvd_train.state import TrainState
from hvd_train.world.world import LocalWorld
from tests.support.runs import small_config

NOTHING = nothing_to_hand_over(LocalWorld())


def test_the_time_limit_counts_from_the_start_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that joins after 20 of 60 minutes has 40 left, whatever the time of day on its host is."""
    config, today = small_config(max_time="1h"), time.time
    for wrong_by in (0, -1200, 1200):
        monkeypatch.setattr(time, "time", lambda wrong_by=wrong_by: today() + wrong_by)
        for minutes, due in ((20, False), (61, True)):
            monkeypatch.setenv(SPENT, str(60 * minutes))
            assert Clocks.of(config).time_limit.due == due
        monkeypatch.delenv(SPENT)
        assert not Clocks.of(config).time_limit.due


def test_a_survivor_reports_how_far_it_is_and_with_which_weights(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer only says who it is. The pause counts from the end of the old world to the next step."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    membership = Membership()
    report = membership.report(state, NOTHING)
    assert (membership.has_trained, report.digest, report.step, report.previous_members) == (False, "", 0, ())
    assert (report.member.host, report.member.process) == (socket.gethostname(), os.getpid())
    assert membership.join([report], Path("run"), 0, has_state=True) is None
    now[0] = 1000.0
    membership.leave("a rank was lost")
    now[0] = 1002.5
    report = membership.report(state, NOTHING)
    assert (report.has_trained, report.step, report.digest) == (True, 7, state.digest())
    assert (report.reason, report.run_dir, len(report.previous_members)) == ("a rank was lost", Path("run"), 1)
    assert report.waited_s == 2.5
    arrival = membership.join([report], Path("run"), 7, has_state=True)
    assert arrival is not None
    now[0] = 1006.0
    assert (arrival.change.steps_lost, arrival.seconds()) == (0, 6.0)


def test_a_step_that_fails_five_times_in_a_row_ends_the_job(state: TrainState) -> None:
    """A step that is done in between starts the count again, and so does a death, which explains the fault."""
    membership, lost = Membership(), RankLost("connection reset")
    for step in (7, 7, 7, 7, 8, 7, 7, 7, 7):
        membership.count_fault(lost, step)
    with pytest.raises(FaultRepeats, match="step 8 has failed 5 times in a row; the last time: connection reset"):
        membership.count_fault(lost, 7)
    membership = Membership()
    others = [RankReport(Member("h2", number)) for number in range(9)]
    membership.join([RankReport(Member("h1", 1)), *others], None, 0, has_state=True)
    for deaths in range(1, 10):
        membership.count_fault(lost, 7)
        membership.join([membership.report(state, NOTHING), *others[deaths:]], None, 7, has_state=True)
    for _ in range(4):
        membership.count_fault(lost, 7)
        membership.join([membership.report(state, NOTHING)], None, 7, has_state=True)
    with pytest.raises(FaultRepeats):
        membership.count_fault(lost, 7)


@pytest.mark.parametrize("elastic", [True, False])
def test_the_next_job_waits_for_members_of_an_elastic_job(
    elastic: bool, state: TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may still commit what they have. A job whose launcher ends all ranks together is not waited for."""
    config = small_config(output_dir=tmp_path / "run")
    run_folder.claim(config, datetime.now()).release()
    if elastic:
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    member = Membership()
    member.join([member.report(state, NOTHING)], tmp_path / "run", 0, has_state=True)
    member.join([member.report(state, NOTHING)], tmp_path / "run", 1, has_state=True)
    if elastic:
        with pytest.raises(run_folder.Busy):
            run_folder.claim(config, datetime.now(), wait=True)
    else:
        run_folder.claim(config, datetime.now(), wait=True).release()
    member.close()
    run_folder.claim(config, datetime.now(), wait=True).release()

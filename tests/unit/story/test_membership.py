"""The report of a process at a rendezvous, and repeated faults."""

from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import pytest

from hvd_train.elastic.members import Member, RankReport
from hvd_train.errors import FaultRepeats, RankLost
from hvd_train.membership import Membership
from hvd_train.run_files import run_folder
from hvd_train.state import TrainState
from tests.support.runs import small_config


def test_a_step_that_fails_five_times_in_a_row_ends_the_job(state: TrainState) -> None:
    """A finished step or the death of a process restarts the count."""
    membership, lost = Membership(), RankLost("connection reset")
    for step in (7, 7, 7, 7, 8, 7, 7, 7, 7):
        membership.count_fault(lost, step)
    with pytest.raises(FaultRepeats, match="step 8 has failed 5 times in a row; the last time: connection reset"):
        membership.count_fault(lost, 7)
    membership = Membership()
    others = [RankReport(Member("h2", number)) for number in range(9)]
    membership.join([RankReport(Member("h1", 1)), *others], 0)
    for deaths in range(1, 10):
        membership.count_fault(lost, 7)
        membership.join([membership.report(state), *others[deaths:]], 7)
    for _ in range(4):
        membership.count_fault(lost, 7)
        membership.join([membership.report(state)], 7)
    with pytest.raises(FaultRepeats):
        membership.count_fault(lost, 7)


@pytest.mark.parametrize("elastic", [True, False])
def test_the_next_job_waits_for_members_of_an_elastic_job(
    elastic: bool, state: TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may still commit; a static job ends its ranks together."""
    config = small_config(output_dir=tmp_path / "run")
    run_folder.claim(config, datetime.now()).release()
    if elastic:
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    member = Membership()
    member.run_dir = tmp_path / "run"
    for step in range(2):
        member.join([member.report(state)], step)
    with pytest.raises(run_folder.Busy) if elastic else nullcontext():
        run_folder.claim(config, datetime.now(), wait=True).release()
    member.close()
    run_folder.claim(config, datetime.now(), wait=True).release()

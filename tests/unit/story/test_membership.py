"""What a process reports when ranks meet, and when a fault is in the step and not in the cluster."""

from __future__ import annotations

import os
import socket
from datetime import datetime
from pathlib import Path

import pytest
import torch

from hvd_train.elastic.members import Member, RankReport
from hvd_train.errors import FaultRepeats, RankLost
from hvd_train.handover import Handover, nothing_to_hand_over
from hvd_train.membership import Membership
from hvd_train.parts import Own, fresh_state, warm_parts
from hvd_train.run_files import run_folder
from hvd_train.state import TrainState
from hvd_train.world.world import LocalWorld
from tests.support.runs import convnet, few_digits, small_config

NOTHING = nothing_to_hand_over(LocalWorld())


@pytest.fixture
def state() -> TrainState:
    """The state before the first step."""
    parts, optimizer = warm_parts(small_config(), LocalWorld(), Own(convnet, few_digits))
    return fresh_state(small_config(), LocalWorld(), parts, optimizer)


def test_a_newcomer_reports_only_who_it_is(state: TrainState) -> None:
    """Its weights are worth nothing to the others, so no digest is computed."""
    membership = Membership()
    report = membership.report(state, NOTHING)
    assert not membership.has_trained
    assert (report.digest, report.step, report.previous_members) == ("", 0, ())
    assert (report.member.host, report.member.process) == (socket.gethostname(), os.getpid())


def test_a_survivor_reports_how_far_it_is_and_with_which_weights(state: TrainState) -> None:
    """So that all ranks can choose the state to go on from."""
    membership = Membership()
    assert membership.join([membership.report(state, NOTHING)], Path("run"), 0, has_state=True) is None
    assert membership.has_trained
    state.progress = state.progress.after_step(20).after_step(20).next_epoch().after_step(20)
    membership.leave("a rank was lost")
    report = membership.report(state, NOTHING)
    assert (report.epoch, report.step, report.digest) == (1, 3, state.digest())
    assert (report.reason, report.run_dir, len(report.previous_members)) == ("a rank was lost", Path("run"), 1)
    assert report.waited_s >= 0
    arrival = membership.join([report], Path("run"), 3, has_state=True)
    assert arrival is not None
    assert arrival.change.steps_lost == 0
    assert arrival.seconds() >= report.waited_s
    assert membership.hosts == [socket.gethostname()]


def test_a_state_counts_again_when_all_ranks_have_come_to_one(state: TrainState, tmp_path: Path) -> None:
    """Half received or distrusted, it is neither sent nor committed until then, whatever happens in between."""
    newcomer, survivor = Membership(), Membership()
    newcomer.lose_state(tmp_path)
    report = newcomer.report(state, NOTHING)
    assert (report.holds, report.digest, report.run_dir) == ("torn", "", tmp_path)
    survivor.join([survivor.report(state, NOTHING)], None, 0, has_state=True)
    assert survivor.has_state
    survivor.distrust_state()
    survivor.lose_state(tmp_path)
    report = survivor.report(state, NOTHING)
    assert (report.holds, report.digest, report.has_trained) == ("distrusted", "", True)
    for one in (newcomer, survivor):
        assert not one.has_state
        one.join([report], tmp_path, 0, has_state=True)
        assert one.has_state
        assert one.report(state, NOTHING).holds == "whole"


def test_a_newcomer_has_no_state_before_all_of_it_has_been_handed_over(state: TrainState, tmp_path: Path) -> None:
    """What it has of it counts in the next meeting; all of it is proven there, and only then it is its own."""
    newcomer = Membership()
    newcomer.lose_state(tmp_path)
    newcomer.join([newcomer.report(state, NOTHING)], tmp_path, 5, has_state=False)
    half, whole = (Handover(LocalWorld(), 0, [(torch.zeros(10),)], keep=False, begin=begin) for begin in (4, 10))
    report = newcomer.report(state, half)
    assert (report.holds, report.digest, report.arrived) == ("torn", "", 4)
    assert not newcomer.has_state
    report = newcomer.report(state, whole)
    assert (report.holds, report.digest, report.arrived) == ("torn", state.digest(), 10)
    assert not newcomer.has_state
    newcomer.join([report], tmp_path, 5, has_state=True)
    assert newcomer.has_state


def test_a_step_that_breaks_again_and_again_ends_the_job() -> None:
    """Five times in a row at one step; a step that is done in between starts the count anew."""
    membership, lost = Membership(), RankLost("connection reset")
    for step in (7, 7, 7, 7, 8, 7, 7, 7, 7):
        membership.count_fault(lost, step)
    with pytest.raises(FaultRepeats, match="step 8 has failed 5 times in a row; the last time: connection reset"):
        membership.count_fault(lost, 7)


def test_deaths_are_no_fault_of_the_step(state: TrainState) -> None:
    """A wave of preemptions within one long step is in the cluster; the same ranks that meet again show a bad step."""
    membership, lost = Membership(), RankLost("connection reset")
    membership.join(
        [RankReport(Member("h1", 1)), *(RankReport(Member("h2", n)) for n in range(9))], None, 0, has_state=True
    )
    for deaths in range(1, 9):
        membership.count_fault(lost, 7)
        alive = [membership.report(state, NOTHING), *(RankReport(Member("h2", n)) for n in range(9 - deaths))]
        membership.join(alive, None, 7, has_state=True)
    membership.join([membership.report(state, NOTHING)], None, 7, has_state=True)
    for _ in range(4):
        membership.count_fault(lost, 7)
        membership.join([membership.report(state, NOTHING)], None, 7, has_state=True)
    with pytest.raises(FaultRepeats):
        membership.count_fault(lost, 7)


def test_a_member_of_an_elastic_job_is_waited_for(
    state: TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next job goes on in the folder when all members have written what they have, or have ended."""
    config = small_config(output_dir=tmp_path / "run")
    run_folder.claim(config, datetime.now()).release()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    member = Membership()
    member.join([member.report(state, NOTHING)], tmp_path / "run", 0, has_state=True)
    member.join([member.report(state, NOTHING)], tmp_path / "run", 1, has_state=True)
    with pytest.raises(run_folder.Busy):
        run_folder.claim(config, datetime.now(), wait=True)
    member.close()
    run_folder.claim(config, datetime.now(), wait=True).release()


def test_the_wait_is_counted_from_the_end_of_a_world_to_the_next_step(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank tells how long it had waited when all met; what comes after that is counted here."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    membership = Membership()
    membership.join([membership.report(state, NOTHING)], None, 0, has_state=True)
    now[0] = 1000.0
    membership.leave("hosts came or went")
    now[0] = 1002.5
    report = membership.report(state, NOTHING)
    assert report.waited_s == 2.5
    arrival = membership.join([report], None, 0, has_state=True)
    assert arrival is not None
    now[0] = 1006.0
    assert arrival.seconds() == 6.0


def test_a_member_of_another_job_is_not_waited_for(state: TrainState, tmp_path: Path) -> None:
    """Where launchers end all ranks together, no job comes that could wait."""
    config = small_config(output_dir=tmp_path / "run")
    run_folder.claim(config, datetime.now()).release()
    member = Membership()
    member.join([member.report(state, NOTHING)], tmp_path / "run", 0, has_state=True)
    run_folder.claim(config, datetime.now(), wait=True).release()
    member.close()

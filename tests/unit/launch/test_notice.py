"""When a process next to rank 0 asks why the job does not go on, and when it says so."""

import math
import os
import subprocess
import sys

import pytest

from hvd_train.launch.notice import Patience, longest_s

NOTICE_S = 60
# Rank 0 has begun to wait for others, and its C code holds Python's lock.
HOLDS_LOCK = """
import ctypes, os
from hvd_train.launch import notice, stacks
stacks.register()
rank_0 = notice.Notice()
rank_0.watch([("localhost", os.getpid())])
with stacks.waiting:
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
"""


class Job:
    """A job that is watched once a second; an answer takes `answer_s`."""

    def __init__(self, answer_s: int = 3, notice_s: int = NOTICE_S) -> None:
        self.now = self.begun = 1000
        self.asked = []
        self.told = []
        self._answer_s = answer_s
        self._patience = Patience(notice_s)

    def runs(self, seconds: int) -> None:
        """Rank 0 begins something new each second."""
        for _ in range(seconds):
            self.begun = self.now
            self.stays(1)

    def stays(self, seconds: int, waits_since: float = math.inf) -> None:
        """Rank 0 begins nothing new, and a rank waits for others from a time on, if any."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1
            todo = self._patience.look(b"%d" % self.begun, self.now)
            if todo == "ask":
                self.asked.append(self.now)
                waited = max(0, self.now - waits_since)
                self._patience.answer(waited, self.now, self.now + self._answer_s)
                self.now += self._answer_s
            elif todo == "tell":
                self.told.append(self.now)


@pytest.mark.parametrize("answer_s", [3, 10])
@pytest.mark.parametrize("later", [0, 5, 20, 100])
def test_a_hang_is_told_once_when_the_notice_is_due(later: int, answer_s: int) -> None:
    """A rank may begin to wait later than rank 0 began what it does; a host may be out of reach."""
    job = Job(answer_s)
    job.runs(5)
    hangs = job.now
    job.stays(600, waits_since=hangs + later)
    assert len(job.told) == 1
    assert NOTICE_S <= job.told[0] - (hangs + later) <= NOTICE_S + 5


def test_each_hang_is_told() -> None:
    job = Job()
    for _ in range(2):
        job.runs(5)
        job.stays(100, waits_since=job.now)
    assert len(job.told) == 2


@pytest.mark.parametrize("notice_s", [2, NOTICE_S])
def test_nothing_is_told_if_no_rank_waits(notice_s: int) -> None:
    """All ranks may evaluate for minutes; an answer may take longer than the time of the notice."""
    job = Job(notice_s=notice_s)
    job.stays(600)
    assert job.asked
    assert job.told == []


def test_nothing_is_told_if_a_job_goes_on_in_time() -> None:
    job = Job()
    job.stays(57, waits_since=job.now)
    job.runs(300)
    assert job.asked
    assert job.told == []


def test_a_job_that_was_paused_has_not_waited() -> None:
    """`scontrol suspend` stops all processes of a job, but not its clock."""
    job = Job()
    job.stays(10, waits_since=job.now)
    job.now += 3600
    job.stays(40, waits_since=1000)
    job.runs(5)
    assert (job.asked, job.told) == ([], [])


def test_the_process_says_where_rank_0_is_and_ends_with_it() -> None:
    """It does so while C code of rank 0 holds Python's lock. An answer takes some seconds."""
    environ = {**os.environ, "HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    command = [sys.executable, "-c", HOLDS_LOCK]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as rank_0:
        assert "rank 0 on localhost is in <string>:8 (<module>)" in rank_0.stderr.readline()
        rank_0.kill()
        assert rank_0.stderr.read()  # to its end, which is that of the process


def test_ranks_that_end_while_they_are_looked_at_do_not_wait() -> None:
    zombie = {"name": "python", "state": "zombie"}
    ranks = {"1": [], "2": [zombie], "3": [{"waited": 5.0}, {"waited": 9.0}]}
    assert longest_s({"h1": {"ranks": ranks}, "h2": "timeout"}) == 5.0
    assert longest_s({"h1": {"ranks": {"1": []}}}) == 0.0

"""An error is printed once for all ranks."""

from __future__ import annotations

import re

import pytest

from hvd_train import cli
from hvd_train.errors import GpuFailed, HvdTrainError, OutOfMemory, RankLost, UsageError
from hvd_train.launch import error_report


def test_errors_are_said_once_for_all_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 says what all have met; another rank says it, with its name, only where no one else ends the job."""
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    for rank, ended, said in ((0, False, "hvd-train: "), (1, True, None), (1, False, "hvd-train: rank 1 on ")):
        monkeypatch.setenv("HOROVOD_RANK", str(rank))
        monkeypatch.setattr(error_report, "_ended_by_launcher", lambda error, ended=ended: ended)
        assert cli.run(["nonsense"]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"{said}") if said else told == ""
    error = UsageError("bad image")
    error.raised_by = 1
    error_report.report_once(error)
    assert re.fullmatch(r"hvd-train: rank 1 on \S+: bad image\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("rank", "ended", "waits", "speaks"), [(0, True, 0, True), (1, True, 1, False), (1, False, 1, True)]
)
def test_memory_that_suffices_on_no_rank_is_said_once(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    ended: bool,
    waits: int,
    speaks: bool,
) -> None:
    """Rank 0 says it and ends, which ends the others; a rank that is alone with it says so after a moment."""
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setenv("HOROVOD_RANK", str(rank))
    waited: list[float] = []
    monkeypatch.setattr(error_report, "_ended_by_launcher", lambda error, limit_s: waited.append(limit_s) or ended)
    error = OutOfMemory("out of memory")
    error.raised_by = rank
    error_report.report_once(error)
    assert len(waited) == waits
    assert (f"hvd-train: rank {rank} on " in capsys.readouterr().err) is speaks


def test_an_error_that_was_reported_is_not_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The roll call has told the user of it on another rank."""
    error = UsageError("bad image")
    error.reported = True
    error_report.report_once(error)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("error", "waits"), [(RankLost("gone"), True), (GpuFailed("NCCL failed"), False)], ids=repr)
def test_rank_0_leaves_it_to_the_launcher_to_name_a_lost_rank(
    monkeypatch: pytest.MonkeyPatch, error: HvdTrainError, waits: bool
) -> None:
    """After a lost rank it waits for the launcher's report; where a GPU has failed, nobody else would end the job."""
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    waited = []
    monkeypatch.setattr(error_report, "_ended_by_launcher", waited.append)
    error_report.report_once(error)
    assert waited == [error] * waits

"""An error is printed once for all ranks."""

from __future__ import annotations

import re

import pytest

from hvd_train import cli
from hvd_train.errors import UsageError
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


def test_an_error_that_was_reported_is_not_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The roll call has told the user of it on another rank."""
    error = UsageError("bad image")
    error.reported = True
    error_report.report_once(error)
    assert capsys.readouterr().err == ""

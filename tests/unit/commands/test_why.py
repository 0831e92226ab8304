"""`hvd-train why`: what it asks, what it prints, and the one line where there is nothing to look at."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from hvd_train import cli
from hvd_train.launch import seat, stacks
from hvd_train.launch.seat import Process, Seat
from hvd_train.run_files import ranks_file
from tests.support.run_folders import start, step, write

HOST = socket.gethostname()


def run_of(folder: Path, *seats: Seat, summary: bool = False) -> Path:
    """Return a run folder in which these processes train."""
    run = write(folder, [start(), step(1)], summary=summary)
    ranks_file.write(run, seats)
    return run


def test_a_rank_here_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This process stands for one, and is found at the line that asks."""
    stacks.answer_why()
    run = run_of(tmp_path / "run", seat.of_this_process({}))
    assert cli.run(["why", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(rank["number"], rank["host"], rank["silence"]) for rank in found["ranks"]] == [(0, HOST, "")]
    assert any(
        frame["function"] == "test_a_rank_here_is_looked_at"
        for thread in found["ranks"][0]["process"]["threads"]
        for frame in thread["frames"]
    )
    assert cli.run(["why", str(run)]) == 0
    printed = capsys.readouterr().out
    assert f"rank 0 on {HOST}" in printed.splitlines()[0]
    assert f"  {HOST}: load " in printed
    assert "innermost call first" in printed


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which a command line is refused."""
    assert cli.run(["why", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    return printed


def test_what_is_no_live_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says so: no run, a run that has ended, one that has not met, and one whose processes are gone."""
    assert "is not a run of hvd_train" in refused([str(tmp_path)], capsys)
    gone = Seat(Process(HOST, os.getpid(), 1), HOST)
    assert "has ended: type `hvd-train report" in refused([str(run_of(tmp_path / "a", gone, summary=True))], capsys)
    assert "no process of the job" in refused([str(run_of(tmp_path / "b", gone))], capsys)
    new = write(tmp_path / "c", [start()])
    assert "its ranks have not met yet" in refused([str(new)], capsys)
    (new / ranks_file.NAME).write_text("[{]")
    assert "is no list of ranks" in refused([str(new)], capsys)
    assert "--timeout" in refused([str(new), "--timeout", "0"], capsys)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to give a folder away")
def test_a_folder_of_another_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts that it names are not connected to."""
    run = run_of(tmp_path / "run", Seat(Process("h9", 7, 1), "h9"))
    os.chown(run, 12345, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert "belongs to another user" in refused([str(run)], capsys)

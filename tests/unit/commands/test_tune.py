"""`hvd-train tune`: what it takes, and what it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_train import cli


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `bench.tune.tune` was called with, in the place of measuring."""
    calls: list[Any] = []
    monkeypatch.setattr("hvd_train.bench.tune.tune", lambda ranks, path, turns, say: calls.append((ranks, path, turns)))
    return calls


def test_ranks_are_started_on_every_slot_of_the_hosts(tuned: list[Any]) -> None:
    """Without --np the host file says how many; the flags of the training reach the ranks."""
    Path("hosts").write_text("localhost slots=3\n")
    assert cli.run(["tune", "digits", "--hosts", "hosts", "--turns", "4", "--seconds=2", "--seed", "7"]) == 0
    ((ranks, path, turns),) = tuned
    assert " -np 3 " in f" {' '.join(ranks.launcher)} "
    assert list(ranks.command[1:]) == ["tune", "digits", "--seed", "7"]
    assert (ranks.turn_s, path, turns) == (2, Path("tuned.env"), 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--controller", "nccl"], "--controller nccl: it must be gloo or mpi"),
        (["--np", "1"], "--np 1: it must be a whole number from 2 on"),
        (["--output", "there.env"], "--output there.env exists"),
        (["--epoch", "3"], "did you mean '--epochs'"),
        (["--hosts", "nowhere"], "cannot read the host file nowhere"),
    ],
)
def test_what_cannot_be_tuned_starts_nothing(
    arguments: list[str], message: str, tuned: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2."""
    Path("there.env").touch()
    assert cli.run(["tune", "digits", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert tuned == []


def test_under_a_launcher_it_refuses(
    tuned: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It starts its ranks itself, again and again; so a launched one says what to type instead."""
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    assert cli.run(["tune", "digits"]) == 2
    assert "type `hvd-train tune --np N`" in capsys.readouterr().err
    assert tuned == []

"""A rank that a program has started: it finds its call, and ends where that program has ended."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.launch import own_pickle
from hvd_train.launch.called import ALIVE, CALL, FACTS, VALUE
from hvd_train.launch.from_python import _PROGRAM


@pytest.fixture
def folder() -> Path:
    """The folder of a program that lives as long as this process."""
    made = Path("caller").resolve()
    made.mkdir(mode=0o700)
    (made / ALIVE).touch()
    (made / FACTS).write_text(json.dumps({"path": sys.path, "argv": ["mine.py", "-v"], "cells": {}}))
    return made


def rank(folder: Path, number: int = 0) -> subprocess.Popen[str]:
    environ = {"HVD_TRAIN_CALLER": str(folder), "HOROVOD_RANK": str(number), "HOROVOD_SIZE": "2"}
    line = [sys.executable, "-c", _PROGRAM]
    return subprocess.Popen(line, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [0, 1])
def test_rank_0_gives_the_value(folder: Path, number: int) -> None:
    """Those of the others are not kept; all see the arguments of the program's command line."""
    own_pickle.write(folder / CALL, (lambda: sys.argv, (), {}))
    with (folder / ALIVE).open("wb") as alive, rank(folder, number) as process:
        fcntl.lockf(alive, fcntl.LOCK_EX)
        assert process.wait(60) == 0
    assert (folder / VALUE).exists() == (number == 0)
    if number == 0:
        assert own_pickle.read(folder / VALUE) == ["mine.py", "-v"]


@pytest.mark.parametrize("deaf", [False, True])
def test_a_rank_ends_with_its_program(folder: Path, deaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By SIGTERM, after which it may commit, and at last by SIGKILL; nobody else is there to remove the folder."""

    def wait(deaf: bool) -> None:
        if deaf:
            signal.signal(signal.SIGTERM, lambda *_: None)
        print("here", flush=True)
        while True:
            signal.pause()

    monkeypatch.setenv("HVD_TRAIN_GRACE_SECONDS", "0.2")
    own_pickle.write(folder / CALL, (wait, (deaf,), {}))
    with (folder / ALIVE).open("wb") as alive:
        fcntl.lockf(alive, fcntl.LOCK_EX)
        with rank(folder) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            fcntl.lockf(alive, fcntl.LOCK_UN)
            assert process.wait(60) == -(signal.SIGKILL if deaf else signal.SIGTERM)
    assert not folder.exists()

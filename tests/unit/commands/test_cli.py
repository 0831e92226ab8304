"""The front door: which command runs, and what the process ends with."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_train import cli
from hvd_train.errors import RankLost


def test_usage_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Help is no error, no command is; an unknown one is answered with the nearest."""
    assert (cli.run([]), cli.run(["--help"])) == (2, 0)
    assert "train [RECIPE]" in capsys.readouterr().out
    assert cli.run(["--version"]) == 0
    assert re.fullmatch(r"hvd-train \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert [cli.run([word]) for word in ("-V", "version")] == [0, 0]
    capsys.readouterr()
    assert cli.run(["trian"]) == 2
    assert capsys.readouterr().err == "hvd-train: unknown command 'trian'; did you mean 'train'?\n"


def test_help_is_a_word_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Alone it is the overview, and with a command the flags of that."""
    assert cli.run(["help"]) == 0
    assert capsys.readouterr().out == cli.overview()
    assert cli.run(["help", "evaluate"]) == 0
    assert "usage: hvd-train evaluate" in capsys.readouterr().out
    assert cli.run(["help", "bench", "input"]) == 0
    assert "usage: hvd-train bench input" in capsys.readouterr().out
    assert cli.run(["help", "trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


def test_an_error_is_one_line_and_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts tell a lost rank from bad settings by the code."""

    def lose_a_rank(arguments: list[str]) -> int:
        raise RankLost(f"no rank {arguments[0]}")

    monkeypatch.setattr("hvd_train.commands.audit.run", lose_a_rank)
    assert cli.run(["audit", "7"]) == RankLost.exit_code == 3
    assert capsys.readouterr().err == "hvd-train: no rank 7\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As in `hvd-train help train | head -1`: the code is that of SIGPIPE, and nothing is said."""
    line = [sys.executable, "-m", "hvd_train", "help", "train"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as help_:
        assert help_.stdout is not None
        assert help_.stderr is not None
        help_.stdout.close()
        assert help_.stderr.read() == b""
    assert help_.returncode == 128 + signal.SIGPIPE


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the code that shells give to a process which SIGINT has ended."""

    def interrupt(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("hvd_train.commands.audit.run", interrupt)
    assert cli.run(["audit"]) == 128 + signal.SIGINT


def test_a_process_that_is_done_ends_at_once(tmp_path: Path) -> None:
    """After what was registered for its end, and without taking modules apart, which takes torch a second or two."""
    code = (
        "import atexit, sys\n"
        "class Last:\n"
        "    def __del__(self): print('taken apart')\n"
        "last, sys.argv = Last(), ['hvd-train', 'no-such-command']\n"
        "atexit.register(print, 'before')\n"
        "from hvd_train import cli\n"
        "run, cli.run = cli.run, lambda arguments: (atexit.register(print, 'registered'), run(arguments))[1]\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "registered\n")
    assert "no-such-command" in done.stderr


@pytest.mark.parametrize(("finalize", "ended"), [(None, ["MPI"]), (True, ["MPI"]), (False, [])])
def test_mpi_is_finalized_where_the_interpreter_would_do_it(
    finalize: bool | None, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends before mpi4py could, and mpirun takes one that has not finalized MPI for one that failed."""
    calls: list[str] = []
    mpi = SimpleNamespace(Is_initialized=lambda: True, Is_finalized=lambda: False, Finalize=lambda: calls.append("MPI"))
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(rc=SimpleNamespace(finalize=finalize)))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    cli._finalize_mpi()
    assert calls == ended

"""`start_ranks`: what comes back from the ranks, how their errors are told, and where none is started."""

from __future__ import annotations

import io
import json
import linecache
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hvd_train
from hvd_train.errors import HvdTrainError, OutOfMemory, RankLost, UsageError
from hvd_train.launch import from_python, horovodrun, last_word
from hvd_train.launch.last_word import LastWord

Start = Callable[..., Any]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """`start_ranks` with a single rank, in a process of its own, without a launcher."""
    alone = ["env", "HOROVOD_RANK=0", "HOROVOD_SIZE=1"]
    monkeypatch.setattr(horovodrun, "line", lambda ranks, host_file, controller: alone)
    return hvd_train.start_ranks


@pytest.fixture
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_a_closure_is_called_and_its_value_comes_back(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """With arguments of both kinds, in another process; what it prints is printed here."""
    factor = 5

    def product(number: int, *, plus: int) -> tuple[int, int]:
        print("computing")
        return os.getpid(), factor * number + plus

    pid, value = start(product, 3, plus=2, np=1)
    assert value == 17
    assert pid != os.getpid()
    assert capsys.readouterr().out == "computing\n"


def test_a_large_value_comes_back_whole(start: Start) -> None:
    """50 MB, say weights."""
    assert start(lambda: b"\x01" * 50_000_000, np=1) == b"\x01" * 50_000_000


def test_an_error_of_the_function_has_its_traceback_with_the_code_of_its_cell(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, named by the rank, without our frames; the rank prints nothing."""
    source, name = "def divide():\n    return 1 / 0  # here\n", str(Path("cell-3").resolve())
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), cell)
    monkeypatch.setitem(linecache.cache, name, (len(source), None, source.splitlines(keepends=True), name))
    with pytest.raises(HvdTrainError) as caught:
        start(cell["divide"], np=1)
    text = str(caught.value)
    assert type(caught.value) is HvdTrainError
    assert text.startswith("rank 0: Traceback")
    assert f'File "{name}", line 2, in divide\n    return 1 / 0  # here\n' in text
    assert text.count("Traceback") == text.count("File ") == 1
    assert "ZeroDivisionError" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", [UsageError, OutOfMemory])
def test_an_error_of_hvd_train_comes_as_what_it_is(start: Start, kind: type[HvdTrainError]) -> None:
    """In its own words."""

    def fail() -> None:
        raise kind("in one line")

    with pytest.raises(kind, match=r"^in one line$"):
        start(fail, np=1)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda: (number for number in range(3)), "^the function returned a generator, which cannot be pickled .*"),
        (lambda: sys.exit(0), "^rank 0 has ended before the function returned$"),
        (lambda: sys.exit(9), "^the ranks ended with exit code 9: what they have printed says why$"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "^the ranks ended with exit code .*9: "),
    ],
)
def test_what_gives_no_value_is_one_line(start: Start, function: Callable[[], Any], told: str) -> None:
    """Also where a rank ends without a word."""
    with pytest.raises(HvdTrainError, match=told) as caught:
        start(function, np=1)
    assert "\n" not in str(caught.value)


def test_nothing_is_left_behind(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the call is gone, whatever became of it."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    start(int, np=1)
    with pytest.raises(HvdTrainError):
        start(int, "no number", np=1)
    assert not any((tmp_path / "temporary").iterdir())


@pytest.mark.usefixtures("_nothing_starts")
@pytest.mark.parametrize("np", [0, -1, True, 2.0, "2", None])
def test_a_number_of_ranks_that_is_none_is_refused(np: Any) -> None:
    """In one line, before anything starts."""
    with pytest.raises(UsageError, match=r"^start_ranks: np=.* must be a number of ranks"):
        hvd_train.start_ranks(int, np=np)


@pytest.mark.usefixtures("_nothing_starts")
def test_what_cannot_be_sent_is_refused() -> None:
    """A function that is none, and an argument that cannot be pickled."""
    with pytest.raises(UsageError, match=r"^start_ranks: the first argument must be a function"):
        hvd_train.start_ranks(3, np=2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^start_ranks: the function or one of its arguments cannot be sent .*lock"):
        hvd_train.start_ranks(print, __import__("threading").Lock(), np=2)


@pytest.mark.usefixtures("_nothing_starts")
def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the command line."""
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(UsageError, match=r"^start_ranks starts ranks, and this process is a rank of horovodrun alre"):
        hvd_train.start_ranks(int, np=2)


class Pressed(io.StringIO):
    """A stream in whose first line the user presses Ctrl-C, twice."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("!") <= 2 and "!" in text:
            raise KeyboardInterrupt
        return written


def test_an_interrupt_is_passed_on_and_raised_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher prints until it has ended is printed, whatever its exit code is."""
    program = (
        "import signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        "print('step 1!', flush=True)\n"
        "assert signal.sigwait({signal.SIGINT}) == signal.SIGINT\n"
        "print('stopping!', flush=True)\n"
        "print('committed')\n"
    )
    shown = Pressed()
    monkeypatch.setattr(sys, "stdout", shown)
    with pytest.raises(KeyboardInterrupt):
        from_python._followed([sys.executable, "-u", "-c", program], os.environ)
    assert shown.getvalue() == "step 1!\nstopping!\ncommitted\n"


@pytest.mark.parametrize(
    ("words", "kind", "told"),
    [
        ({0: LastWord(3, "rank 1 is lost"), 1: LastWord(1, "Traceback of mine")}, HvdTrainError, "rank 1: Traceback"),
        ({0: LastWord(3, "rank 1 is lost"), 1: LastWord(137)}, RankLost, "rank 1 is lost"),
        ({0: LastWord(2, "no such data"), 1: LastWord(2, "no such data")}, UsageError, "no such data"),
        ({1: LastWord(2, "no such data here")}, UsageError, "rank 1: no such data here"),
    ],
)
def test_the_error_is_that_of_the_rank_that_knows_best(
    words: dict[int, LastWord], kind: type[HvdTrainError], told: str, tmp_path: Path
) -> None:
    """Who only sees that another is gone does not; a word that is torn does not matter."""
    for rank, word in words.items():
        environ = {"HVD_TRAIN_CALLER": str(tmp_path), "HOROVOD_RANK": str(rank)}
        assert last_word.say(environ, word)
    (tmp_path / last_word.file_of(2)).write_text(json.dumps({"exit_code": 1})[:-3])
    error = from_python._error(tmp_path, 1, 4)
    assert type(error) is kind
    assert str(error).startswith(told)

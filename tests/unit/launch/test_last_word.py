"""A worker's last word reaches the driver of its job, once; without a driver the process prints its error itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from horovod.runner.http.http_server import RendezvousServer

from hvd_train import cli
from hvd_train.errors import UsageError
from hvd_train.launch import client, last_word, rank_log
from hvd_train.launch.last_word import LastWord
from hvd_train.launch.launcher import WORKER


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of worker 1007 of a driver; what is put there can be read again."""
    monkeypatch.setattr(last_word, "_told", [])
    server = RendezvousServer()
    return {client.ADDRESS: "127.0.0.1", client.PORT: str(server.start()), WORKER: "1007"}


def heard(environ: dict[str, str]) -> LastWord:
    """What the driver has heard."""
    return last_word.heard(client.get(environ, "last_word/1007", 20))


def test_a_word_arrives_as_it_was_said(environ: dict[str, str]) -> None:
    """Exit code, error and place."""
    assert last_word.say(environ, LastWord(0))
    assert heard(environ) == LastWord(0)
    assert last_word.tell(environ, UsageError("cat.jpg is torn"), "training", 17)
    assert heard(environ) == LastWord(2, "cat.jpg is torn", "training", 17)


def test_an_error_that_nobody_expected_comes_with_its_traceback(environ: dict[str, str]) -> None:
    """The user needs the line of the model that raised it."""
    try:
        {}["missing"]
    except KeyError as error:
        assert last_word.tell(environ, error)
    word = heard(environ)
    assert (word.exit_code, word.during) == (1, "building")
    assert word.error.startswith("Traceback")
    assert "KeyError: 'missing'\n" in word.error
    assert word.error.endswith(", in test_an_error_that_nobody_expected_comes_with_its_traceback)")


def test_an_error_is_told_once(environ: dict[str, str]) -> None:
    """The place where it was raised knows best; the front door finds it told."""
    error = UsageError("cat.jpg is torn")
    assert last_word.tell(environ, error, "training", 17)
    assert last_word.tell(environ, error)
    assert heard(environ).during == "training"


def test_without_a_driver_the_process_prints_its_error(environ: dict[str, str]) -> None:
    """Static jobs have none, and a driver may be gone."""
    assert not last_word.tell({}, UsageError("wrong"))
    assert not last_word.say({**environ, client.PORT: "1"}, LastWord(0))


def test_the_front_door_leaves_errors_to_the_driver(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It prints nothing and waits for nobody; only the rank's own log has the error as well."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    log = (tmp_path / "h1-0.log").open("a+")
    monkeypatch.setattr(rank_log, "_files", [log.fileno()])
    assert cli.run(["nonsense"]) == 2
    assert "unknown command 'nonsense'" in heard(environ).error
    monkeypatch.setattr(cli, "command", lambda name: 1 / 0)
    assert cli.run(["train"]) == 1
    assert "ZeroDivisionError: division by zero" in heard(environ).error
    assert capsys.readouterr().err == ""
    with log:
        log.seek(0)
        told = log.read()
    assert "nonsense" in told
    assert "ZeroDivisionError" in told
    monkeypatch.delenv(WORKER)
    assert cli.run(["train"]) == 1
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(SystemExit(143), 143), (SystemExit(), 0), (SystemExit("why"), 1), (KeyError("a bug"), 1)]
)
def test_the_code_of_the_process_is_told(error: BaseException, code: int, environ: dict[str, str]) -> None:
    """As Python will end the process; the error goes on its way."""
    with pytest.raises(type(error)), last_word.exit_code_told(environ):
        raise error
    assert heard(environ) == LastWord(code)


def test_an_exit_code_does_not_take_the_place_of_the_error(environ: dict[str, str]) -> None:
    """The driver knows more already."""
    assert last_word.tell(environ, UsageError("cat.jpg is torn"))
    with pytest.raises(SystemExit), last_word.exit_code_told(environ):
        sys.exit(2)
    assert heard(environ).error == "cat.jpg is torn"


def test_nobody_is_told_where_nobody_listens() -> None:
    """Outside elastic jobs there is no driver, and a driver that is gone changes nothing."""
    gone = {WORKER: "1007", client.ADDRESS: "127.0.0.1", client.PORT: "1"}
    for environ in ({}, gone):
        with pytest.raises(SystemExit) as left, last_word.exit_code_told(environ):
            sys.exit(3)
        assert left.value.code == 3

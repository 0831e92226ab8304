"""The exit report reaches the driver once; without a driver, one rank prints the error for all."""

import json
import re
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from horovod.runner.http.http_server import RendezvousServer

from hvd_train import cli
from hvd_train.errors import UsageError
from hvd_train.launch import client, exit_report
from hvd_train.launch.exit_report import ExitReport
from hvd_train.launch.workers import WORKER

Environ = dict[str, str]


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[Environ]:
    monkeypatch.setattr(exit_report, "_sent", [])
    server = RendezvousServer()
    environ = {client.ADDRESS: "127.0.0.1", client.PORT: str(server.start()), WORKER: "1000"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    yield environ
    server.stop()


def received(environ: Environ) -> ExitReport:
    return ExitReport(**json.loads(client.get(environ, "exit_report/1000", 60)))


def test_an_error_is_reported_once_with_its_place(environ: Environ) -> None:
    error = UsageError("cat.jpg is torn")
    assert exit_report.send(error, "training", 17)
    assert exit_report.send(error)
    with pytest.raises(SystemExit), exit_report.reporting_exit_code():
        sys.exit(2)
    assert received(environ) == ExitReport(2, "cat.jpg is torn", "training", 17)


@pytest.mark.parametrize(
    ("error", "code"), [(SystemExit(143), 143), (SystemExit(), 0), (KeyError("a bug"), 1)]
)
def test_the_exit_code_of_the_process_is_reported(
    error: BaseException, code: int, environ: Environ
) -> None:
    with pytest.raises(type(error)), exit_report.reporting_exit_code():
        raise error
    assert received(environ) == ExitReport(code)


def test_the_end_of_a_training_is_reported_until_the_program_trains_again(
    environ: Environ,
) -> None:
    exit_report.training_ended(0, 40, is_last=True)
    with pytest.raises(SystemExit), exit_report.reporting_exit_code():
        sys.exit(0)
    assert received(environ) == ExitReport(0, during="ended", step=40)
    exit_report.training_begins()
    assert client.get(environ, "exit_report/1000", 60) == "null"


def test_the_command_line_leaves_errors_to_the_driver(
    environ: Environ, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["nonsense"]) == 2
    assert "unknown command 'nonsense'" in received(environ).error
    monkeypatch.setattr(cli.launcher, "refuse_others", lambda *_, **__: 1 / 0)
    assert cli.run(["train"]) == 1
    assert received(environ).error.count("ZeroDivisionError: division by zero") == 1
    assert capsys.readouterr().err == ""


def test_an_error_is_printed_by_one_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    for rank, ended, line in (
        ("0", False, "hvd-train: unknown .*\n"),
        ("1", True, ""),
        ("1", False, r"hvd-train: rank 1 on \S+: unknown .*\n"),
    ):
        monkeypatch.setenv("HOROVOD_RANK", rank)
        monkeypatch.setattr(exit_report, "_ended_by_launcher", Mock(return_value=ended))
        assert cli.run(["nonsense"]) == 2
        assert re.fullmatch(line, capsys.readouterr().err)
    error = UsageError("bad image")
    error.raised_by = 1
    exit_report.report_once(error)
    assert re.fullmatch(r"hvd-train: rank 1 on \S+: bad image\n", capsys.readouterr().err)


def test_a_script_ends_with_one_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other errors, and those of a user who types, are left to whoever showed them before."""
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error))
    exit_report.report_in_one_line()
    exit_report.report_in_one_line()
    wrong = (UsageError, UsageError("type something else"), None)
    other = (ValueError, ValueError("what"), None)
    with pytest.raises(SystemExit, match="2"):
        sys.excepthook(*wrong)
    assert capsys.readouterr().err == "hvd-train: type something else\n"
    sys.excepthook(*other)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(*wrong)
    assert shown == [other, wrong]

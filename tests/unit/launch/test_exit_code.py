"""The exit code that an elastic worker tells its driver before it ends."""

from __future__ import annotations

import sys

import pytest

from hvd_train.launch import client, exit_code
from hvd_train.launch.launcher import WORKER


@pytest.mark.parametrize(
    ("error", "code"),
    [(SystemExit(143), "143"), (SystemExit(), "0"), (SystemExit("why"), "1"), (KeyError("a bug"), "1")],
)
def test_the_code_of_the_process_is_told(error: BaseException, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python will end the process; the error goes on its way."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(client, "put", lambda environ, path, text, timeout_s: told.append((path, text)))
    with pytest.raises(type(error)), exit_code.told_to_driver({WORKER: "1007"}):
        raise error
    assert told == [("exit_code/1007", code)]


def test_nobody_is_told_where_nobody_listens() -> None:
    """Outside elastic jobs there is no driver, and a driver that is gone changes nothing."""
    gone = {WORKER: "1007", client.ADDRESS: "127.0.0.1", client.PORT: "1"}
    for environ in ({}, gone):
        with pytest.raises(SystemExit) as left, exit_code.told_to_driver(environ):
            sys.exit(3)
        assert left.value.code == 3

"""The command that lists hosts: its output and its failures."""

import subprocess
from collections.abc import Mapping
from unittest.mock import Mock

import pytest

from hvd_train.elastic.dispatcher import Discovery
from hvd_train.elastic.driver import HostCommand


def test_hosts_are_read_from_a_command() -> None:
    assert HostCommand("printf 'a:2\\nb\\n\\n'", 4).find_available_hosts_and_slots() == {"a": 2, "b": 4}
    assert HostCommand("echo a", None).find_available_hosts_and_slots() == {"a": 1}
    assert HostCommand("true", None).find_available_hosts_and_slots() == {}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo a:two", "which is not NAME:SLOTS"),
        ("echo -G:2", "printed '-G:2', which is no name of a host"),
        ("echo 'h1 -G'", "no name of a host"),
        ("echo first >&2; echo 'no such file' >&2; exit 1", "^no such file$"),
        ("exit 3", "ended with exit code 3"),
    ],
)
def test_a_bad_list_is_one_line(command: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostCommand(command, 1).find_available_hosts_and_slots()


def test_a_command_that_hangs_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_train.elastic.driver._COMMAND_S", 0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        HostCommand("exec sleep 60", 1).find_available_hosts_and_slots()


def test_after_a_failure_the_last_list_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    error, found = ValueError("no such file"), list[Mapping[str, int]]()
    discovery = Discovery(Mock(side_effect=[{"a": 1}, error, error, {"a": 1, "b": 2}]), found.append)
    for _ in range(4):
        discovery.look()
    assert found == [{"a": 1}, {"a": 1, "b": 2}]
    assert capsys.readouterr().err == "hvd-train: hosts: no such file; the last list stays in force\n"

"""horovodrun's search for the interfaces by which hosts reach one another believes, and tells, only who has the key."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from horovod.runner.common.util.outcome import JobFailedError
from horovod.runner.http import signature
from horovod.runner.util import ways

from tests.support.impostor import answering
from tests.support.strangers import attack

LOOPBACK = "127.0.0.1"
HERE = {"theirs": [LOOPBACK]}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signature.KEY, signature.make_key())


@contextmanager
def trickling() -> Iterator[int]:
    """Listen on the loopback, and answer whoever comes a byte at a time, without end."""
    stop = threading.Event()
    with socket.create_server((LOOPBACK, 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while not stop.wait(0.02):
                    connection.sendall(b"x")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            stop.set()
            thread.join()


def test_a_host_finds_its_own_interface() -> None:
    """The one from which the other host saw it come; where nobody answers, there is no way."""
    with ways._listening() as port:
        assert ways.reached({**HERE, "off": ["no address"]}, port) == {"theirs": ["lo"]}
    assert ways.reached(HERE, port) == {}


def test_an_address_that_the_network_has_changed_is_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks tell each other their own addresses, which nobody could reach then."""
    monkeypatch.setattr(ways, "_interfaces", lambda: {"eth0": ["10.9.8.7"]})
    with ways._listening() as port:
        assert ways.reached(HERE, port) == {}


@pytest.mark.parametrize("signed", ["", f"{signature.SIGNATURE}: {'0' * 64}\r\n"])
def test_an_impostor_is_no_way(signed: str) -> None:
    """Two hosts often have an address in common, and another user may listen there."""
    with answering(f"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n{signed}\r\n{LOOPBACK}".encode()) as port:
        assert ways.reached(HERE, int(port)) == {}


def test_an_impostor_does_not_hold_up_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer never ends."""
    monkeypatch.setattr(ways, "_ALL_S", 0.3)
    with trickling() as port:
        assert ways.reached(HERE, port) == {}


def test_whatever_a_stranger_sends_the_search_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No code runs, half a message holds up nobody, one line tells of it, and a stranger learns nothing."""
    with ways._listening() as port:
        attack((LOOPBACK, port), tmp_path / "owned")
        assert ways.reached(HERE, port) == {"theirs": ["lo"]}
        with socket.create_connection((LOOPBACK, port), 20) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            told = b"".join(iter(lambda: connection.recv(1000), b""))
    assert b" 403 " in told and LOOPBACK.encode() not in told
    assert not (tmp_path / "owned").exists()
    errors = capfd.readouterr().err
    assert errors.count("refused a request") == errors.count("\n") == 1


@pytest.mark.parametrize("told", ["", "gASVAAAA", "[]", '{"key": "k"}', '{"key": "k", "port": 1, "addresses": [1]}'])
def test_what_is_started_by_hand_ends_in_one_line(
    told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only horovodrun starts it; its pickles of before are refused."""
    monkeypatch.setattr("sys.stdin", io.StringIO(told))
    monkeypatch.setenv(signature.KEY, "of before")
    with pytest.raises(SystemExit) as ended:
        ways.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def search(monkeypatch: pytest.MonkeyPatch, *answers: str, own: str = "eth0 ib0") -> list[str]:
    """Return what is found where the other hosts print these lines, or end with an error where they are no JSON."""
    interfaces = {"lo": [LOOPBACK], **{name: [f"10.0.{i}.1"] for i, name in enumerate(own.split())}}
    monkeypatch.setattr(ways, "_interfaces", lambda: interfaces)
    monkeypatch.setattr(ways, "get_remote_command", lambda command, host, **options: host)
    monkeypatch.setattr(ways, "_interface_to", lambda host, interfaces: "ib0")

    def execute(host: str, stdout: io.StringIO, stderr: io.StringIO, events: object, stdin: bytes) -> int:
        assert "lo" not in json.loads(stdin)["addresses"]
        line = answers[int(host[1:]) - 2]
        stdout.write(f"welcome to {host}\n{ways._FOUND if line[0] == '{' else ''}{line}\n")
        stderr.write("" if line[0] == "{" else f"Traceback\n{line}\n")
        return 0 if line[0] == "{" else 255

    monkeypatch.setattr(ways.safe_shell_exec, "execute", execute)
    settings = SimpleNamespace(
        ssh_port=None, ssh_identity_file=None, start_timeout=SimpleNamespace(remaining=lambda: 20.0)
    )
    return list(ways.common_interfaces([f"h{number}" for number in range(2, 2 + len(answers))], settings))


BOTH = json.dumps({"eth0": ["eth0"], "ib0": ["ib0"]})


def test_what_all_hosts_have_in_common_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """First the one to which the hosts' names lead, since ranks meet by the first."""
    assert search(monkeypatch, BOTH, BOTH) == ["ib0", "eth0"]
    assert search(monkeypatch, BOTH, json.dumps({"eth0": ["eth1", "eth0"], "ib0": ["eth0"]})) == ["eth0"]


def test_the_way_to_a_host_is_that_of_its_packets() -> None:
    """Where only ssh knows the name, no interface comes first."""
    interfaces = {"eth0": ["10.9.8.7"], "lo": [LOOPBACK]}
    assert ways._interface_to(LOOPBACK, interfaces) == "lo"
    assert ways._interface_to("no-such-host.invalid", interfaces) == ""


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (["{}"], r"h2 reaches none of the addresses of this host \(eth0 10.0.0.1, ib0 10.0.1.1\)"),
        ([BOTH, '{"eth0": ["ens3"]}'], "h2 reaches eth0 by eth0, ib0 by ib0; h3 reaches eth0 by ens3"),
        ([BOTH, "No module named horovod"], "h3 cannot look for its way here: No module named horovod$"),
    ],
)
def test_where_nothing_is_found_one_line_says_why(
    answers: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the host, and what that has found."""
    with pytest.raises(JobFailedError, match=message) as caught:
        search(monkeypatch, *answers)
    assert "\n" not in str(caught.value)

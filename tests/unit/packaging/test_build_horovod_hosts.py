"""What is wrong in a list of hosts is one line, and no name is an option of ssh."""

from __future__ import annotations

from pathlib import Path

import pytest
from horovod.runner import launch
from horovod.runner.common.util import hosts

OPTION = "no host has a name that begins with -, which ssh takes as an option"


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("h1:1,-G:1", OPTION),
        ("-oProxyCommand=x:1", OPTION),
        ("h1", '"h1" in the list of hosts is not of the form NAME:SLOTS'),
        ("h1:1,", '"" in the list of hosts'),
        ("h1;h2:1", '"h1;h2:1"'),
    ],
)
@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
def test_a_list_that_is_wrong(
    controller: str,
    listed: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whichever way the ranks are started, exit code 2 and the entry."""
    monkeypatch.setenv("HOROVOD_RENDEZVOUS_KEY", "which the launcher puts its own in place of")
    monkeypatch.setattr("sys.argv", ["horovodrun", controller, "-np", "1", f"--hosts={listed}", "true"])
    monkeypatch.setattr(launch, "outlive", lambda: None)
    with pytest.raises(SystemExit) as ended:
        launch.run_commandline()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("line", ["-G slots=1", "-G:1", "-G", "-oProxyCommand slots=2"])
def test_a_host_file_that_is_wrong(line: str, tmp_path: Path) -> None:
    """The line is named, with the reason."""
    (tmp_path / "hosts").write_text(f"h1 slots=1\n{line}\n")
    with pytest.raises(hosts.HostsError, match=f'hosts, line 2: "{line}" is not of the form .*; {OPTION}$'):
        hosts.parse_host_files(str(tmp_path / "hosts"))


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_host_file_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    """It is named, too."""
    if content is not None:
        (tmp_path / "hosts").write_bytes(content)
    with pytest.raises(hosts.HostsError, match=r"cannot read the host file .*hosts: "):
        hosts.parse_host_files(str(tmp_path / "hosts"))

"""`hvd-train hosts`: a host file, checked and rewritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train.cli import run


def file(text: str) -> Path:
    """A host file with this text."""
    path = Path("hosts")
    path.write_text(text)
    return path


def test_names_that_do_not_resolve(capsys: pytest.CaptureFixture[str]) -> None:
    """Told before a launcher waits for them; without asking the file is converted all the same."""
    path = file("localhost slots=2\nno-such-host.invalid slots=2\n")
    assert run(["hosts", str(path)]) == 2
    assert "unknown here: no-such-host.invalid" in capsys.readouterr().err
    assert run(["hosts", str(path), "--no-resolve", "--to", "slurm"]) == 0
    assert capsys.readouterr().out == "localhost\nlocalhost\nno-such-host.invalid\nno-such-host.invalid\n"


def test_a_good_file_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The hosts and how many ranks they take."""
    assert run(["hosts", str(file("localhost:2\n127.0.0.1\n"))]) == 0
    assert capsys.readouterr().out == "2 hosts, 3 slots: localhost (2), 127.0.0.1 (1)\n"


def test_no_such_file(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2."""
    assert run(["hosts", "nowhere"]) == 2
    assert "cannot read the host file nowhere: No such file or directory" in capsys.readouterr().err


def test_a_host_file_does_not_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong line, and a path, are shown in signs that a terminal does not obey."""
    path = Path("\x1b[2Jhosts")
    path.write_text("h1\x1b]0;title\x07\u202e slots=2\n")
    assert run(["hosts", str(path)]) == 2
    printed = capsys.readouterr()
    assert "hosts, line 1: " in printed.err
    assert not {"\x1b", "\x07", "\u202e"} & set(printed.out + printed.err)

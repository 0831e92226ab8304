"""What `hvd-train doctor` prints and returns."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from hvd_train.commands import doctor
from hvd_train.doctor.findings import Finding, Verdict
from hvd_train.errors import UsageError


def test_the_table_cuts_nothing_off_at_80_columns() -> None:
    """Every word of a long finding and of its advice is printed, in lines of 80 at most and without escapes."""
    what, todo = "what " * 60, "python " * 60
    printed = io.StringIO()
    Console(file=printed, width=80).print(doctor.table([Finding("horovodrun --gloo", "broken", what, todo)]))
    lines = printed.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 80
    assert printed.getvalue().count("what") == 60
    assert printed.getvalue().count("python") == 60
    assert "\x1b" not in printed.getvalue()


def test_nothing_that_other_hosts_say_acts_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ssh and the agents on other hosts have answered is in names, findings and advice."""
    hostile = "h1\x1b]0;title\x07\u202e[/b] is"
    finding = Finding(hostile, "broken", hostile, hostile)
    monkeypatch.setattr("hvd_train.doctor.doctor.examine", lambda say, quick: [say(hostile), finding][1:])
    assert doctor.run([]) == 1
    printed = capsys.readouterr()
    assert not {"\x1b", "\x07", "\u202e"} & set(printed.out + printed.err)
    assert printed.out.count("]0;title") == 4
    assert doctor.run(["--json"]) == 1
    assert not {"\x1b", "\x07", "\u202e"} & set(capsys.readouterr().out)


def test_the_last_sentence_names_what_is_broken() -> None:
    """Broken checks, warnings and what was left out are in the one sentence at the end."""
    fine, odd, bad = Finding("a", "ok", ""), Finding("b", "warning", ""), Finding("c", "broken", "")
    assert doctor.sentence([fine], quick=False) == "All is well."
    assert doctor.sentence([fine], quick=True) == "All is well. No allreduce was tried."
    assert doctor.sentence([fine, odd], quick=False) == "Nothing is broken; warnings: b."
    assert doctor.sentence([fine, odd, bad], quick=False) == "Broken: c; warnings: b."
    assert doctor.as_dict([fine, bad], quick=False)["ok"] is False


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("warning", 0), ("broken", 1)])
def test_exit_code(
    verdict: Verdict, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what is broken makes the exit code 1, and --json prints one object and nothing else."""
    monkeypatch.setattr("hvd_train.doctor.doctor.examine", lambda say, quick: [Finding("x", verdict, "y", "z")])
    assert doctor.run(["--json"]) == code
    assert json.loads(capsys.readouterr().out)["findings"] == [
        {"name": "x", "verdict": verdict, "what": "y", "todo": "z"}
    ]
    assert doctor.run([]) == code
    assert "-> z" in capsys.readouterr().out


def test_a_launched_doctor_refuses() -> None:
    """Inside a world it would start worlds within worlds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_RANK", "0")
        patch.setenv("HOROVOD_SIZE", "2")
        with pytest.raises(UsageError, match="without a launcher") as raised:
            doctor.run([])
    assert raised.value.exit_code == 2

"""What the doctor finds, tells and returns."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hvd_train.doctor import doctor
from hvd_train.doctor.doctor import DoctorOptions
from hvd_train.doctor.findings import Finding, Verdict
from hvd_train.doctor.horovod_findings import Installed
from hvd_train.errors import UsageError
from tests.support.facts import RECORD, installed


@pytest.fixture
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod as the doctor finds it in a process of its own: Python looks for no package that it has already."""
    monkeypatch.delitem(sys.modules, "horovod", raising=False)


def test_own_programs_come_first_unless_horovod_has_the_machines_mpi() -> None:
    """An environment that is not activated is found, and a Horovod for the machine's MPI gets that one's mpirun."""
    environ = {"PATH": "/usr/bin"}
    assert doctor.search_path(None, environ).endswith(":/usr/bin")
    assert doctor.search_path(installed(), environ).endswith(":/usr/bin")
    machines = installed({**RECORD, "mpi": "Open MPI 5.0.7 (/usr/bin/mpicxx)"})
    assert doctor.search_path(machines, environ).startswith("/usr/bin:")


@pytest.mark.usefixtures("not_imported")
def test_horovod_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder, version, build record and torch of the first Horovod on the path, even if it cannot be imported."""
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor.find_horovod() == Installed(package, "of unknown version", None, "")

    (tmp_path / "horovod-0.28.1.dist-info").mkdir()
    (tmp_path / "horovod-0.28.1.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    (package / "metadata.json").write_text('{"pytorch": "2.0.1"}')
    assert doctor.find_horovod() == Installed(package, "0.28.1", None, "2.0.1")

    (package / doctor.RECORD).write_text(json.dumps(RECORD))
    assert doctor.find_horovod() == Installed(package, "0.28.1", RECORD, "2.15.0+cu132")


@pytest.mark.usefixtures("not_imported")
def test_a_folder_named_horovod_is_no_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes any folder for a package; one without code counts as absent."""
    (tmp_path / "horovod").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert doctor.find_horovod() is None


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


def test_the_last_sentence_names_what_is_broken() -> None:
    """Broken checks, warnings and what was left out are in the one sentence at the end."""
    fine, odd, bad = Finding("a", "ok", ""), Finding("b", "warning", ""), Finding("c", "broken", "")
    tried, quick = DoctorOptions(), DoctorOptions(quick=True)
    assert doctor.sentence([fine], tried) == "All is well."
    assert doctor.sentence([fine], quick) == "All is well. No allreduce was tried."
    assert doctor.sentence([fine, odd], tried) == "Nothing is broken; warnings: b."
    assert doctor.sentence([fine, odd, bad], tried) == "Broken: c; warnings: b."
    assert doctor.as_dict([fine, bad], tried)["ok"] is False


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("warning", 0), ("broken", 1)])
def test_exit_code(
    verdict: Verdict, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what is broken makes the exit code 1, and --json prints one object and nothing else."""
    monkeypatch.setattr(doctor, "examine", lambda options, say: [Finding("x", verdict, "y", "z")])
    assert doctor.main(["--json"]) == code
    assert json.loads(capsys.readouterr().out)["findings"] == [
        {"name": "x", "verdict": verdict, "what": "y", "todo": "z"}
    ]
    assert doctor.main([]) == code
    assert "-> z" in capsys.readouterr().out


def test_a_launched_doctor_refuses() -> None:
    """Inside a world it would start worlds within worlds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_RANK", "0")
        patch.setenv("HOROVOD_SIZE", "2")
        with pytest.raises(UsageError, match="without a launcher") as raised:
            doctor.main([])
    assert raised.value.exit_code == 2

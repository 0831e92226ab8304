"""Horovod is found without being imported, and programs are looked for in the right order."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hvd_train.doctor import doctor
from hvd_train.doctor.horovod_findings import Installed
from tests.support.facts import BUILD, installed


@pytest.fixture
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod as the doctor finds it in a process of its own: Python looks for no package that it has already."""
    monkeypatch.delitem(sys.modules, "horovod", raising=False)


def test_own_programs_come_first_unless_horovod_has_the_machines_mpi() -> None:
    """An environment that is not activated is found, and a Horovod for the machine's MPI gets that one's mpirun."""
    environ = {"PATH": "/usr/bin"}
    assert doctor.search_path(None, environ).endswith(":/usr/bin")
    assert doctor.search_path(installed(), environ).endswith(":/usr/bin")
    machines = installed({**BUILD, "mpi": "Open MPI 5.0.7 (/usr/bin/mpicxx)"})
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

    (package / doctor.BUILD_FILE).write_text(json.dumps(BUILD))
    assert doctor.find_horovod() == Installed(package, "0.28.1", BUILD, "2.15.0+cu132")


@pytest.mark.usefixtures("not_imported")
def test_a_folder_named_horovod_is_no_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes any folder for a package; one without code counts as absent."""
    (tmp_path / "horovod").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert doctor.find_horovod() is None

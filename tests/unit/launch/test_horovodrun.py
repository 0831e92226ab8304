"""The horovodrun commands of our own: which program is taken, and what Open MPI is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import horovodrun


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The programs of a Python environment with horovodrun, from which this process seems to run."""
    programs = tmp_path / "environment" / "bin"
    programs.mkdir(parents=True)
    (programs / "horovodrun").touch()
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.delenv("OPAL_PREFIX", raising=False)
    monkeypatch.delenv("OMPI_MCA_orte_launch_agent", raising=False)
    return programs


def test_the_program_beside_python_is_taken(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other hosts have it in the same place; one that is not there comes from the PATH, or is an error of one line."""
    assert horovodrun.program("horovodrun") == str(environment / "horovodrun")
    assert horovodrun.program("sh").endswith("/sh")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"there is no mpirun beside .* type `hvd-train doctor`"):
        horovodrun.program("mpirun")


def test_a_line_as_a_user_would_type_it(environment: Path) -> None:
    """With the number of ranks, the host file where there is one, and the controller."""
    program = str(environment / "horovodrun")
    assert horovodrun.line(2, None, "gloo") == [program, "-np", "2", "--gloo"]
    assert horovodrun.line(4, "hosts", "mpi") == [program, "-np", "4", "--hostfile", "hosts", "--mpi"]


def test_open_mpi_4_of_the_environment_is_told_where_it_is(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With MPI alone; what the user has set stays."""
    (environment / "orted").touch()
    prefix, agent = f"OPAL_PREFIX={environment.parent}", f"OMPI_MCA_orte_launch_agent={environment / 'orted'}"
    assert horovodrun.line(2, None, "mpi")[:3] == ["env", prefix, agent]
    assert horovodrun.line(2, None, "gloo")[0] != "env"
    monkeypatch.setenv("OPAL_PREFIX", "/opt/mpi")
    assert horovodrun.line(2, None, "mpi")[:2] == ["env", agent]

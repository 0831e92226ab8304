"""The steps of a set-up, and what they print."""

from __future__ import annotations

import ast
import errno
import fcntl
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from environment import locked
from environment_setup import steps
from environment_setup.checkout import Checkout
from environment_setup.show import first_errors, network_cause, step
from environment_setup.steps import Setup, SetupError

from tests.support.programs import write_program

PACKAGING = Path(__file__).resolve().parents[3] / "packaging"


def test_set_up_parses_as_python_3_6() -> None:
    """The set-up parses in Python 3.6, so that an old Python prints a message and no SyntaxError."""
    parts = sorted((PACKAGING / "environment_setup").glob("*.py"))
    assert parts
    for path in [PACKAGING / "environment.py", *parts]:
        ast.parse(path.read_text(), feature_version=(3, 6))


def test_a_second_setup_waits_for_the_first(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A set-up that finds the lock taken says so and waits for it."""
    asked: list[int] = []

    def flock(file: Any, operation: int) -> None:
        asked.append(operation)
        if operation & fcntl.LOCK_NB:
            raise OSError(errno.EWOULDBLOCK, "taken")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(checkout):
        assert asked == [fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX]
    assert "waiting for it" in capsys.readouterr().out


def test_steps_do_not_see_packages_outside_the_environment(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH and pip's targets, which modules of clusters set, do not reach pip."""
    monkeypatch.setenv("PYTHONPATH", "/opt/module/lib")
    monkeypatch.setenv("PIP_TARGET", "/opt/target")
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setattr(steps, "has_python_headers", lambda compiler: True)
    seen = Setup(checkout, None, lock=None).environment()
    assert not {"PYTHONPATH", "PIP_TARGET"} & set(seen)
    assert seen["PIP_USER"] == "0"


def test_pip_downloads_into_the_checkout_or_where_the_user_says(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Downloads of a killed set-up lie where the next one deletes them, so that they do not fill /tmp."""
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    setup = Setup(checkout, None, lock=None)
    assert setup.temporary_folder() == checkout.root / "build" / "tmp"
    monkeypatch.setenv("TMPDIR", "/scratch")
    assert setup.temporary_folder() == Path("/scratch")


def test_a_step_is_one_line_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    """A step that succeeds prints how long it took, and one that fails says so, each on its own line."""
    with step("baking"):
        pass
    with pytest.raises(SetupError), step("burning"):
        raise SetupError("smoke")
    baked, burnt = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"==> baking \.\.\. \d+\.\d s", baked)
    assert burnt == "==> burning ... failed"


def test_errors_of_a_step_are_quoted_from_the_log(tmp_path: Path) -> None:
    """An error quotes the lines of the log that report errors of this step, not of an earlier one."""
    log = tmp_path / "setup.log"
    log.write_text("ERROR: before\n")
    start = log.stat().st_size
    with log.open("a") as text:
        text.write("$ pip install\nCollecting torch\nERROR: No matching distribution found for torch==9\n")
    assert first_errors(log, start) == ["  ERROR: No matching distribution found for torch==9"]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("Failed to establish a new connection: [Errno -3] Temporary failure in name resolution", "its name"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "PIP_CERT"),
        ("ERROR: HTTP error 403 while getting", "refuses"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("something else", ""),
    ],
)
def test_the_cause_of_no_network_is_named(output: str, words: str) -> None:
    """The output of pip becomes a few words on why it reached nothing."""
    assert words in network_cause(output)


def test_the_cause_is_not_looked_for_in_the_command(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The time limit in pip's command is not taken for a time-out of the package index."""
    write_program(checkout.python.parents[1], "made", "")  # the folder of the environment
    write_program(
        checkout.python.parent, checkout.python.name, "echo ERROR: HTTP error 403 while getting wheel; exit 1"
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(steps, "has_python_headers", lambda compiler: True)
    with open(tmp_path / "lock", "w") as lock, pytest.raises(SetupError, match="it refuses access"):
        checkout.log.parent.mkdir(parents=True)
        with checkout.log.open("wb") as log:
            Setup(checkout, None, lock=lock).check_network(log)

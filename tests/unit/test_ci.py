"""`.ci/run` says what it does, ends at the first failure, and hides nothing that the machine lacks."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import skips
from tests.support.programs import Program

RUN = Path(__file__).parents[2] / ".ci" / "run"


def ran(program: Program, lacking: str = "", failing: str = "") -> tuple[int, list[str]]:
    """Run it with a `make` whose target `failing` ends with 3; return its exit code and its lines, without seconds."""
    program("make", f'echo "made $1, no skips: $HVD_TRAIN_NO_SKIPS"; [ "$1" != "{failing}" ] || exit 3')
    program("python3", f"echo {lacking}")
    program("apt-get", "echo Reading; echo 'E: no network' >&2; exit 100")
    program("dirname", 'echo "${1%/*}"')
    environment = {name: value for name, value in os.environ.items() if name != skips.STRICT}
    done = subprocess.run(["/bin/bash", RUN], env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert not done.stderr
    return done.returncode, [re.sub(r"\d+ s$", "N s", line) for line in done.stdout.splitlines()]


def test_every_stage_is_announced_and_no_test_may_be_skipped(program: Program) -> None:
    """On a machine that lacks nothing a test that is skipped for want of a program is a failure."""
    stages = [
        (f".ci/run: make {target}", f"made {target}, no skips: 1", f".ci/run: make {target}: 0 after N s")
        for target in ("test", "check", "test-slow")
    ]
    assert ran(program) == (0, [line for stage in stages for line in stage])


@pytest.mark.parametrize(("failing", "made"), [("test", 1), ("check", 2), ("test-slow", 3)])
def test_the_first_failure_ends_it(failing: str, made: int, program: Program) -> None:
    """With the exit code of that stage, whose name is in the last line."""
    code, lines = ran(program, failing=failing)
    assert (code, lines[-1]) == (3, f".ci/run: make {failing}: 3 after N s")
    assert sum(line.startswith("made") for line in lines) == made


@pytest.mark.parametrize("failing", ["", "check"])
def test_what_cannot_be_installed_is_said_first_and_last(failing: str, program: Program) -> None:
    """Whether or not the tests pass; as root with apt's reason."""
    code, lines = ran(program, "chromium shellcheck", failing)
    said = ".ci/run: not on this machine: chromium shellcheck; the tests that need them are skipped"
    tried = [
        ".ci/run: installing chromium shellcheck, without which tests are skipped",
        ".ci/run: apt-get: E: no network",
    ]
    assert lines[: lines.index(said)] == (tried if os.geteuid() == 0 else [])
    assert (code, lines[-1]) == (3 if failing else 0, said)
    assert "made test, no skips: " in lines


def test_what_is_left_out_of_ci_is_there() -> None:
    """Each line of long.txt names a test by its file and its function; one that was renamed would be forgotten."""
    root = RUN.parents[1]
    lines = [line for line in (root / "tests/long.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines))
    for line in lines:
        file, _, name = line.partition("::")
        assert f"\ndef {name.partition('[')[0]}(" in (root / file).read_text(), line

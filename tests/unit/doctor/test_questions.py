"""What the doctor reads in the output of child processes, and that its programs start."""

from __future__ import annotations

import os
import sys

import pytest

from hvd_train.doctor import children, questions
from hvd_train.doctor.children import Outcome
from hvd_train.doctor.questions import ANSWER, answer, first_error


@pytest.mark.parametrize(
    ("outcome", "facts"),
    [
        (Outcome(0, f'noise\n[1,0]<stdout>:{ANSWER}{{"size": 2}}\n'), {"size": 2}),
        (Outcome(0, f'{ANSWER}{{"a": 1}}\n{ANSWER}{{"a": 2}}\n'), {"a": 2}),
        (Outcome(-11, f'{ANSWER}{{"a": 1}}\n'), {"a": 1, "error": "killed by SIGSEGV"}),
        (Outcome(1, "ValueError: why\n"), {"error": "ValueError: why"}),
        (Outcome(5, ""), {"error": "exit code 5, and no word of why"}),
        (Outcome(None, "", 7.0), {"error": "no end in 7 s"}),
    ],
)
def test_answers(outcome: Outcome, facts: dict[str, object]) -> None:
    """The last answer counts; a crash, a failure and a hang are errors even after an answer."""
    assert answer(outcome) == facts


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("Traceback (most recent call last):\n  File x\nOSError: no route to host\n", "OSError: no route to host"),
        ("[1,1]<stderr>:horovod.common.HorovodInternalError: broken\n", "horovod.common.HorovodInternalError: broken"),
        ("-----\nThere are not enough slots available\n-----\n", "There are not enough slots available"),
        ("-----\nmpirun was unable to find\nthe executable.\nTo fix:\n", "mpirun was unable to find the executable."),
        ("[0] Abort(1): Fatal error in MPI_Init\n", "Abort(1): Fatal error in MPI_Init"),
        ("\n----\nsomething odd\nmore\n", "something odd"),
        ("", ""),
    ],
)
def test_first_error(output: str, line: str) -> None:
    """It is the line that says what went wrong, of all that a launcher prints."""
    assert first_error(output) == line


@pytest.mark.parametrize("program", ["TORCH", "HOROVOD", "MPI4PY", "ALLREDUCE", "BANDWIDTH"])
def test_the_programs_are_python(program: str) -> None:
    """They are texts, so that no other test would see a slip of syntax before the doctor does."""
    compile(getattr(questions, program), program, "exec")


def test_a_missing_package_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The innermost error is the answer, in one line, and the child ends without a traceback."""
    program = questions.MPI4PY.replace("import mpi4py", "import no_such_package")
    with children.children(os.environ) as group:
        found = answer(group.start([sys.executable, "-c", program], 60.0).outcome())
    assert found == {"error": "ModuleNotFoundError: No module named 'no_such_package'"}

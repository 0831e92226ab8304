"""A crash in native code names the line of Python."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from hvd_train.launch import crashes

CRASH = """import ctypes, os; from hvd_train.launch import crashes; crashes.tell_where(os.environ)
{more}
ctypes.string_at(0)"""


def test_a_segmentation_fault_names_the_line() -> None:
    """On standard error, of the thread that has met it."""
    done = subprocess.run([sys.executable, "-c", CRASH.format(more="")], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert 'File "<string>", line 3 in <module>' in done.stderr


def test_ucx_leaves_the_signals_to_python() -> None:
    """The library that comes with Open MPI, and with Horovod, prints sixty lines of native frames otherwise."""
    pytest.importorskip("horovod.torch")
    done = subprocess.run(
        [sys.executable, "-c", CRASH.format(more="import horovod.torch")], capture_output=True, text=True, check=False
    )
    assert "==== backtrace" not in done.stderr
    assert 'File "<string>", line 3 in <module>' in done.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"UCX_ERROR_SIGNALS": ""}),
        ({"UCX_ERROR_SIGNALS": "SEGV"}, {"UCX_ERROR_SIGNALS": "SEGV"}),
        ({"UCX_HANDLE_ERRORS": "freeze"}, {"UCX_HANDLE_ERRORS": "freeze"}),
    ],
)
def test_what_the_user_has_set_for_ucx_stays(before: dict[str, str], after: dict[str, str]) -> None:
    """Both variables say what UCX does with signals."""
    crashes.tell_where(before)
    assert before == after

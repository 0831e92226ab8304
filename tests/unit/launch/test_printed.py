"""What a launcher keeps of what a rank prints."""

from __future__ import annotations

import io
from threading import Thread

import pytest

from hvd_train.launch import printed
from hvd_train.launch.printed import Printed, Shown

CRASH = """Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 9 in conv2d
  File "/home/me/mine.py", line 20 in forward
  File "/home/me/mine.py", line 3 in <module>

Extension modules: torch._C, numpy.linalg (total: 2)
"""


def taken(text: str, tag: str = "") -> Printed:
    """What is kept of these lines, before each of which the launcher has put a tag."""
    kept = Printed()
    for line in text.splitlines(keepends=True):
        kept.take(tag + line)
    return kept


@pytest.mark.parametrize("tag", ["", "[1]<stderr>:", "[1,1]<stderr>:", "[prterun-h1-7@1,1]<stderr>: ", "[1] "])
def test_a_crash_names_the_users_line(tag: str) -> None:
    """Whatever the launcher puts before a line: the innermost frame of the user's files, and the last function."""
    kept = taken(f"epoch 1\n{CRASH}epoch 2\n", tag)
    assert kept.crashed_at == "/home/me/mine.py, line 20, in forward (through conv2d)"
    assert kept.last == ("epoch 1", "epoch 2")


def test_a_tag_inside_a_line_is_taken_out() -> None:
    """Open MPI repeats its tag where a rank writes a line in pieces."""
    assert taken("[1,1]<stderr>:ha[1,1]<stderr>:lf\n").last == ("half",)


def test_a_traceback_ends_with_its_error() -> None:
    """The line that names the error is kept, of the last traceback; its frames are no last lines."""
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\nKeyError: 1\n'
    kept = taken(f"hello\n{text}\nDuring handling of it:\n\n{text.replace('KeyError: 1', 'OSError: full')}")
    assert kept.error == "OSError: full"
    assert kept.last == ("hello", "During handling of it:")
    assert not kept.told


def test_what_hvd_train_tells_counts_until_something_else_is_printed() -> None:
    """A note at the start does not stand for the error at the end."""
    assert taken("hvd-train: out of memory; step 3 is committed; the same command goes on from there\n").goes_on
    assert taken("hvd-train: out of memory\n").told
    assert taken("hvd-train: rank 1 on h1: Traceback (most recent call last):\n  File\nKeyError: 1\n").told
    assert not taken("hvd-train: a note\nepoch 1\n").told


def test_a_flood_is_not_kept() -> None:
    """Two lines stay, and of a long one its beginning; a crash has a hundred frames at most."""
    kept = taken("x" * 1_000_000 + "\n" + CRASH + '  File "a.py", line 1 in f\n' * 10_000 + "one\ntwo\n")
    assert kept.last == ("one", "two")
    assert len(kept._crash or []) <= 100
    assert len(taken("x" * 1_000_000).last[0]) == 300


def test_the_rank_that_spoke_last_is_known() -> None:
    """What it has printed is right above what its launcher says next."""
    one, other = taken("a\n"), Printed()
    assert one.came_last()
    other.take("b\n")
    assert not one.came_last()
    assert other.came_last()


def test_lines_belong_to_the_rank_that_a_thread_runs() -> None:
    """The stream shows what it keeps; another thread's rank has lines of its own."""
    console = io.StringIO()
    with printed.kept() as mine:
        Shown(console, printed.current()).write("[0]<stdout>:mine\n")
        thread = Thread(target=lambda: Shown(console, printed.current()).write("other\n"))
        thread.start()
        thread.join()
    assert console.getvalue() == "[0]<stdout>:mine\nother\n"
    assert mine.last == ("mine",)
    assert printed.current() is not mine

"""The stacks of faulthandler, as it writes them here."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from hvd_train.doctor import hang_stacks


def test_the_stacks_of_this_process() -> None:
    """Each thread is there with its frames, the innermost first, and the signal's own is known."""
    ready, end = threading.Event(), threading.Event()

    def wait_here() -> None:
        ready.set()
        end.wait()

    thread = threading.Thread(target=wait_here)
    thread.start()
    ready.wait()
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode()
    end.set()
    thread.join()
    threads = hang_stacks.read(text)
    other = next(one for one in threads if any(frame.function == "wait_here" for frame in one.frames))
    assert other.their_frame is not None
    assert other.their_frame.function == "wait_here"
    (own,) = [one for one in threads if one.has_signal]
    assert own.frames[0].function == "test_the_stacks_of_this_process"
    assert own.frames[0].place.startswith(f"{Path(__file__).name}:")


def test_the_first_thread_is_the_one_of_the_program(tmp_path: Path) -> None:
    """It is told from others by the module in which it begins, also where another thread had the signal."""
    program = tmp_path / "mine.py"
    program.write_text(
        "import faulthandler, threading\n"
        "def dump():\n    faulthandler.dump_traceback(all_threads=True)\n"
        "def main():\n    thread = threading.Thread(target=dump); thread.start(); thread.join()\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    main = hang_stacks.main_thread(hang_stacks.read(done.stderr))
    assert main is not None
    assert main.their_frame is not None
    assert (main.their_frame.place, main.their_frame.function) == ("mine.py:5", "main")


def test_text_that_is_none() -> None:
    """What faulthandler has not written has no threads."""
    assert hang_stacks.read("hello\n  File nothing\n") == ()
    assert hang_stacks.main_thread(()) is None

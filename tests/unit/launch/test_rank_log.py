"""--log-dir: what a process prints, kept in a file as well."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import rank_log
from tests.support.programs import write_program

PRINTS = """
import os, subprocess, sys
from pathlib import Path
from hvd_train.launch import rank_log
rank_log.start(Path("logs"), os.environ)
rank_log.start(Path("logs"), os.environ)
print("from Python")
sys.stdout.flush()
os.write(1, b"from native code\\n")
subprocess.run(["sh", "-c", "echo from a child"])
{end}
"""


def printed(folder: Path, end: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a process that prints in three ways and then does `end`."""
    program = [sys.executable, "-c", PRINTS.format(end=end)]
    environment = {**os.environ, **environ}
    return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


LINES = ["from Python", "from native code", "from a child"]


def test_all_that_is_printed_is_kept(tmp_path: Path) -> None:
    """Python, native code and children, each line once, on its way and in the file."""
    done = printed(tmp_path, "")
    assert done.stdout.splitlines() == LINES
    assert (tmp_path / "logs/rank-0.log").read_text().splitlines() == LINES


def test_an_error_is_kept(tmp_path: Path) -> None:
    """The traceback of a rank that fails is in its file, and on stderr, not on stdout."""
    done = printed(tmp_path, "raise ValueError('a bug')", HOROVOD_RANK="3", HOROVOD_SIZE="4")
    assert done.returncode == 1
    assert done.stdout.splitlines() == LINES
    assert done.stderr.splitlines()[-1] == "ValueError: a bug"
    # Two streams, so two pipes: which of them is in the file first is not said.
    assert "ValueError: a bug" in (tmp_path / "logs/rank-3.log").read_text().splitlines()


def test_words_before_a_kill_are_kept(tmp_path: Path) -> None:
    """What was printed before kill -9 has arrived, here and in the file."""
    done = printed(tmp_path, "os.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.splitlines() == LINES
    assert (tmp_path / "logs/rank-0.log").read_text().splitlines() == LINES


def test_a_second_start_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """Nothing that was there is lost."""
    for _ in range(2):
        printed(tmp_path, "")
    assert (tmp_path / "logs/rank-0.log").read_text().splitlines() == LINES * 2


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    """One line that names the flag."""
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(UsageError, match=r"--log-dir .*/logs: rank-0.log cannot be written \(File exists\)"):
        rank_log.start(tmp_path / "logs", {})


def test_workers_of_an_elastic_job_are_told_apart_by_their_place() -> None:
    """Their ranks change."""
    name = rank_log.name_of({"HOROVOD_ELASTIC": "1", "HVD_TRAIN_SLOT": "2", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"})
    assert name.endswith("-2.log")
    assert not name.startswith("rank-")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_written_at_once(stream: str, unbuffered: str) -> None:
    """A reader that sees where writes end gets whole lines, also where Python keeps nothing back."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    program = "import sys; from hvd_train.launch import rank_log; rank_log.whole_lines(); "
    program += f"print('a', 'line', file=sys.{stream})"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with ours, theirs:
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60, **{stream: theirs})
        assert ours.recv(100) == b"a line\n"


OUTLIVES = """
import logging, os, subprocess, sys
from hvd_train import console
from hvd_train.launch import rank_log
logging.basicConfig(level="INFO", stream=sys.stderr)
rank_log.whole_lines()
console.outlive()
{start}
print("first", flush=True)
sys.stdin.readline()  # by now the reader has gone
for _ in range(3):
    print("to nobody", flush=True)
    print("to nobody", file=sys.stderr)
    logging.info("to nobody")
    sys.stdout.write("x" * 100_000)
    os.write(1, b"from native code")
with open("done", "w") as file:
    file.write("done")
"""


@pytest.mark.parametrize("kept", [False, True], ids=["printed", "kept as well"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_ends_no_rank(kept: bool, unbuffered: str, tmp_path: Path) -> None:
    """A launcher or an ssh that is gone costs what is printed from then on, and not the rank; --log-dir keeps it."""
    start = "from pathlib import Path; rank_log.start(Path('logs'), os.environ)" if kept else ""
    program = OUTLIVES.format(start=start)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as rank:
        assert rank.stdin and rank.stdout and rank.stderr
        assert rank.stdout.readline() == "first\n"
        rank.stdout.close()
        rank.stderr.close()
        rank.stdin.write("gone\n")
        rank.stdin.flush()
        assert rank.wait(60) == 0
    assert (tmp_path / "done").exists()
    if kept:
        assert (tmp_path / "logs/rank-0.log").read_text().count("to nobody\n") == 9


@pytest.mark.parametrize("link", ["soft", "hard"])
def test_a_link_in_the_folder_is_not_written_through(link: str, tmp_path: Path) -> None:
    """Whoever can make files in the folder cannot have ours written into another one: the error names the file."""
    outside, file = tmp_path / "outside", tmp_path / "logs" / "rank-0.log"
    outside.write_text("precious")
    file.parent.mkdir()
    if link == "soft":
        file.symlink_to(outside)
    else:
        file.hardlink_to(outside)
    done = printed(tmp_path, "")
    assert "--log-dir logs: rank-0.log cannot be written (it is " in done.stderr
    assert outside.read_text() == "precious"


def test_a_link_that_takes_the_place_of_the_file_is_not_written_through(tmp_path: Path) -> None:
    """However soon: all that is printed, and the last word, go into the file that was opened at the start."""
    (tmp_path / "outside").write_text("precious")
    replaced = "mkdir once 2>/dev/null && mv logs/rank-0.log kept && ln -s ../outside logs/rank-0.log"
    write_program(tmp_path / "bin", "tee", f'{replaced}\nexec {shutil.which("tee")} "$@"')
    waits = "while not os.path.islink('logs/rank-0.log'): pass"
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = printed(tmp_path, f"{waits}\nrank_log.write('the last word')\nprint('later')", PATH=path)
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "kept").read_text().splitlines()) == sorted([*LINES, "the last word", "later"])
    assert (tmp_path / "outside").read_text() == "precious"


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    """The user has named it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "logs").symlink_to("disk")
    printed(tmp_path, "")
    assert (tmp_path / "disk/rank-0.log").read_text().splitlines() == LINES

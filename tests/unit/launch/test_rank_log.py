"""What ranks print: whole lines, kept with --log-dir, and never the end of a rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import rank_log

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
LINES = ["from Python", "from native code", "from a child"]


def printed(folder: Path, end: str, **environ: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", PRINTS.format(end=end)]
    environment = {**os.environ, **environ}
    return subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(("end", "code"), [("", 0), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)])
def test_all_that_is_printed_is_kept(end: str, code: int, tmp_path: Path) -> None:
    for times in (1, 2):
        done = printed(tmp_path, end)
        assert (done.returncode, done.stdout.splitlines()) == (code, LINES)
        assert (tmp_path / "logs/rank-0.log").read_text().splitlines() == LINES * times


def test_an_error_is_kept(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "logs").symlink_to("disk")
    done = printed(tmp_path, "raise ValueError('a bug')", HOROVOD_RANK="3", HOROVOD_SIZE="4")
    assert (done.returncode, done.stdout.splitlines()) == (1, LINES)
    assert done.stderr.splitlines()[-1] == "ValueError: a bug"
    assert "ValueError: a bug" in (tmp_path / "disk/rank-3.log").read_text().splitlines()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(UsageError, match=r"--log-dir .*/logs: rank-0.log cannot be written \(File exists\)"):
        rank_log.start(tmp_path / "logs", {})
    name = rank_log.name_of({"HOROVOD_ELASTIC": "1", "HVD_TRAIN_SLOT": "2", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"})
    assert name == f"{socket.gethostname()}-2.log"


@pytest.mark.parametrize(("stream", "unbuffered"), [("stdout", "1"), ("stderr", "")])
def test_a_line_is_written_as_one_piece(stream: str, unbuffered: str) -> None:
    """Launchers that prefix each piece with a rank do not break lines, also under PYTHONUNBUFFERED."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    program = "import sys; from hvd_train.launch import rank_log; rank_log.whole_lines(); "
    program += f"print('a', 'line', file=sys.{stream})"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with ours, theirs:
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120, **{stream: theirs})
        assert ours.recv(100) == b"a line\n"


OUTLIVES = """
import logging, os, subprocess, sys
from pathlib import Path
from hvd_train import console
from hvd_train.launch import rank_log
logging.basicConfig(level="INFO", stream=sys.stderr)
rank_log.whole_lines()
console.outlive()
if {kept}:
    rank_log.start(Path("logs"), os.environ)
print("first", flush=True)
sys.stdin.readline()  # by now the reader has gone
for _ in range(3):
    print("unread", flush=True)
    print("unread", file=sys.stderr)
    logging.info("unread")
    sys.stdout.write("x" * 100_000)
    os.write(1, b"from native code")
Path("done").touch()
"""


@pytest.mark.parametrize(("kept", "unbuffered"), [(False, "1"), (True, "")])
def test_a_reader_that_has_gone_ends_no_rank(kept: bool, unbuffered: str, tmp_path: Path) -> None:
    """A lost launcher or ssh costs what is printed from then on, and not the rank; --log-dir keeps it."""
    program, pipe = [sys.executable, "-c", OUTLIVES.format(kept=kept)], subprocess.PIPE
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(program, cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as rank:
        assert rank.stdin and rank.stdout and rank.stderr
        assert rank.stdout.readline() == b"first\n"
        rank.stdout.close()
        rank.stderr.close()
        rank.stdin.write(b"gone\n")
        rank.stdin.flush()
        assert rank.wait(120) == 0
    assert (tmp_path / "done").exists()
    if kept:
        assert (tmp_path / "logs/rank-0.log").read_text().count("unread\n") == 9


def test_a_link_in_the_folder_is_not_written_through(tmp_path: Path) -> None:
    outside, file = tmp_path / "outside", tmp_path / "logs" / "rank-0.log"
    outside.write_text("precious")
    file.parent.mkdir()
    for link in (file.symlink_to, file.hardlink_to):
        file.unlink(missing_ok=True)
        link(outside)
        with pytest.raises(UsageError, match=r"--log-dir .*logs: rank-0.log cannot be written \(it is "):
            rank_log.start(tmp_path / "logs", {})
    assert outside.read_text() == "precious"

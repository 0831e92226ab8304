"""Output of ranks: whole lines, kept with --log-dir."""

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


def test_all_output_is_kept() -> None:
    """A second run adds its output."""
    for times, (end, code) in enumerate((("", 0), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)), 1):
        command = [sys.executable, "-c", PRINTS.format(end=end)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout.splitlines()) == (code, LINES)
        assert Path("logs/rank-0.log").read_text().splitlines() == LINES * times


def test_a_worker_of_an_elastic_job_keeps_its_file() -> None:
    name = rank_log.name_of({"HOROVOD_ELASTIC": "1", "HVD_TRAIN_SLOT": "2", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"})
    assert name == f"{socket.gethostname()}-2.log"


@pytest.mark.parametrize(("stream", "unbuffered"), [("stdout", "1"), ("stderr", "")])
def test_a_line_is_written_as_one_piece(stream: str, unbuffered: str) -> None:
    """Launchers prefix each piece with a rank; PYTHONUNBUFFERED must not break lines."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    program = "import sys; from hvd_train.launch import rank_log; rank_log.whole_lines(); "
    program += f"print('a', 'line', file=sys.{stream})"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with ours, theirs:
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120, **{stream: theirs})
        assert ours.recv(100) == b"a line\n"


def test_a_log_is_complete_without_a_reader_of_the_output() -> None:
    """A lost launcher or ssh reads nothing more."""
    reader, writer = os.pipe()
    os.close(reader)
    prepare = "from hvd_train import console\nfrom hvd_train.launch import rank_log\nrank_log.whole_lines()\n"
    program = f"{prepare}console.outlive()\n{PRINTS.format(end='print(chr(120) * 100_000)')}"
    subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=writer, check=True)
    os.close(writer)
    assert Path("logs/rank-0.log").read_text().splitlines() == [*LINES, "x" * 100_000]


def test_a_link_in_the_folder_is_refused() -> None:
    Path("logs").mkdir()
    Path("logs/rank-0.log").symlink_to(Path("outside").absolute())
    with pytest.raises(UsageError, match=r"--log-dir logs: rank-0.log cannot be written \(it is a symlink"):
        rank_log.start(Path("logs"), {})

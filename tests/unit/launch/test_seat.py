"""Where the process of a rank is found, and that of its launcher."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.launch import seat
from hvd_train.launch.seat import Process


def test_the_seat_of_this_process() -> None:
    """Its number, and when it was started, are the kernel's."""
    own = seat.of_this_process({})
    assert (own.process.host, own.process.number) == (socket.gethostname(), os.getpid())
    assert own.process.started == int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


@pytest.mark.parametrize(("told", "address"), [("h7", "h7"), ("localhost", None), ("127.0.0.1", None), ("", None)])
def test_the_launchers_name_of_the_host(told: str, address: str | None) -> None:
    """It is taken, unless it means this machine whoever reads it."""
    assert seat.of_this_process({"HOROVOD_HOSTNAME": told}).address == (address or socket.gethostname())


def test_the_driver_tells_its_workers() -> None:
    """Workers on other hosts cannot see it among the processes above them; what is no process is none."""
    told = seat.told_to_workers()
    assert seat.of_this_process({seat.DRIVER: told}).launcher == seat.of_this_process({}).process
    assert seat.of_this_process({seat.DRIVER: "h1 x"}).launcher in (None, seat.of_this_process({}).launcher)


def test_a_launcher_above_is_found(tmp_path: Path) -> None:
    """It is told by its name, however many shells are between."""
    launcher = tmp_path / "horovodrun"
    shutil.copy("/bin/sh", launcher)
    program = "import os; from hvd_train.launch import seat; print(seat.of_this_process({}).launcher)"
    line = f"sh -c '{sys.executable} -c \"{program}\"; true'; true"
    with subprocess.Popen([str(launcher), "-c", line], stdout=subprocess.PIPE, text=True) as process:
        found = process.communicate(timeout=60)[0].strip()
    assert found.startswith(str(Process(socket.gethostname(), process.pid, 0)).partition("started")[0])

"""Run one rank of an MPI job: mpirun starts this program, and this program starts the rank.

mpirun cannot stop ranks gently: it waits a fixed time before SIGTERM and the same time before SIGKILL, even if all
ranks have ended, and it stops the other ranks in this way when one fails. So each rank has a guard in a session of its
own, which mpirun does not signal. The guard sends its rank one SIGTERM, and waits for it to commit, when

- SIGUSR1 arrives, which mpirun passes on from horovodrun, or SIGTERM or SIGINT, or
- mpirun, or its daemon on this host, has ended or has killed what it started: then the pipe to the guard closes.

The guard reports the start and the end of its rank to horovodrun, each in one line of standard error. This module
imports nothing of Horovod, since it starts with every rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shlex
import signal
import subprocess
import sys
import time

STARTED, ENDED = "started", "ended"
_NOTICE = "<horovodrun: rank {rank} {what} {code}>"
_ANSWER_S = 10.0  # how long a guard waits for horovodrun's second signal after the ranks' time
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def notice(what: str, code: int = 0) -> str:
    """Return the line that reports to horovodrun that the rank has STARTED or ENDED."""
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "?")
    return _NOTICE.format(rank=rank, what=what, code=code)


def _report(what: str, code: int = 0) -> None:
    with contextlib.suppress(OSError):  # horovodrun is gone
        os.write(2, f"{notice(what, code)}\n".encode())


def guard(command: list[str], orders: int, grace_s: float) -> int:
    """Run the rank, and stop it when the pipe `orders` can be read; return its exit code, as a shell has it.

    If the rank was stopped or failed, wait for a second byte in the pipe, which horovodrun sends when all ranks have
    ended, and return 0: if this process ended, mpirun would kill the ranks that still commit.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, *_STOP_SIGNALS):  # the guard itself ends last
        signal.signal(number, lambda signum, frame: None)
    _report(STARTED)
    try:
        rank = subprocess.Popen(command, start_new_session=True, close_fds=False)  # MPICH hands one down
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        _report(ENDED, 127)
        return 127
    deadline: float | None = None
    closed = False
    while rank.poll() is None:
        pipes = [woken] if closed else [woken, orders]
        ready, _, _ = select.select(pipes, [], [], None if deadline is None else max(0.0, deadline - time.monotonic()))
        if woken in ready:
            os.read(woken, 512)
        if orders in ready:
            closed = not os.read(orders, 1)
            if deadline is None:
                deadline = time.monotonic() + grace_s
                rank.terminate()
        if deadline is not None and time.monotonic() >= deadline:
            rank.kill()
            rank.wait()
    with contextlib.suppress(OSError):
        os.killpg(rank.pid, signal.SIGKILL)  # processes that it left behind
    code = rank.returncode if rank.returncode >= 0 else 128 - rank.returncode
    _report(ENDED, code)
    end = time.monotonic() + grace_s + _ANSWER_S
    asked = deadline is not None
    while (code or asked) and not closed and time.monotonic() < end:
        if not select.select([orders], [], [], 1.0)[0]:
            _report(ENDED, code)  # mpirun may have cut the first one in two, if the rank printed much at its end
        elif os.read(orders, 1) and not asked:
            asked = True  # that was the order to stop
        else:
            return 0
    return code


def main() -> int:
    """Run `mpi_rank.py SECONDS COMMAND`: a rank and its seconds to stop; the command is one argument.

    Returns the rank's exit code.
    """
    grace_s, command = float(sys.argv[1]), shlex.split(sys.argv[2])
    orders, order = os.pipe()
    guarding = os.fork()
    if guarding == 0:
        os.close(order)
        os.setsid()
        os._exit(guard(command, orders, grace_s))
    os.close(orders)
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: SIGTERM when mpirun's daemon is gone
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda signum, frame: os.write(order, b"."))
    _, status = os.waitpid(guarding, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


if __name__ == "__main__":
    sys.exit(main())

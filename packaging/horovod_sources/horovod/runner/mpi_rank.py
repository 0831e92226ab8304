"""Run one rank of an MPI job: mpirun starts this program, and this program starts the rank.

mpirun cannot stop ranks gently: it waits out a fixed time before SIGTERM and the same time again before SIGKILL, though
all have ended long before, and the first rank that fails ends the others in that way. So a rank has a guard, out of
mpirun's reach, which gives the rank one SIGTERM and its time to commit as soon as

- SIGUSR1 arrives, which mpirun passes on from horovodrun, or SIGTERM or SIGINT, or
- mpirun, or its daemon on this host, has ended or has killed what it started: then the pipe to the guard closes.

What horovodrun must know goes to it by standard error, in a line of its own for each rank that starts or ends.
Imports nothing of Horovod, since it starts with every rank.
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
_ANSWER_S = 10.0  # how much longer than for the ranks a guard waits for horovodrun's last word
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def notice(what: str, code: int = 0) -> str:
    """Return the line by which this process tells horovodrun that its rank has STARTED or ENDED."""
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "?")
    return _NOTICE.format(rank=rank, what=what, code=code)


def _tell(what: str, code: int = 0) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(2, f"{notice(what, code)}\n".encode())


def guard(command: list[str], told: int, grace_s: float) -> int:
    """Run the rank, and end it once `told`, the end of a pipe, can be read; return its exit code, as a shell has it.

    Where a rank was told to end, or failed, this waits for another word through the pipe, which horovodrun sends once
    all ranks have ended, and returns 0: mpirun, seeing the end of this process, would kill the ranks that still commit.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, *_STOP_SIGNALS):  # the guard itself ends last
        signal.signal(number, lambda signum, frame: None)
    _tell(STARTED)
    try:
        rank = subprocess.Popen(command, start_new_session=True, close_fds=False)  # MPICH hands one down
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        _tell(ENDED, 127)
        return 127
    deadline: float | None = None
    closed = False
    while rank.poll() is None:
        pipes = [woken] if closed else [woken, told]
        ready, _, _ = select.select(pipes, [], [], None if deadline is None else max(0.0, deadline - time.monotonic()))
        if woken in ready:
            os.read(woken, 512)
        if told in ready:
            closed = not os.read(told, 1)
            if deadline is None:
                deadline = time.monotonic() + grace_s
                rank.terminate()
        if deadline is not None and time.monotonic() >= deadline:
            rank.kill()
            rank.wait()
    with contextlib.suppress(OSError):
        os.killpg(rank.pid, signal.SIGKILL)  # what it has left behind
    code = rank.returncode if rank.returncode >= 0 else 128 - rank.returncode
    _tell(ENDED, code)
    end = time.monotonic() + grace_s + _ANSWER_S
    asked = deadline is not None
    while (code or asked) and not closed and time.monotonic() < end:
        if not select.select([told], [], [], 1.0)[0]:
            _tell(ENDED, code)  # mpirun may have cut the first one in two, if the rank printed much at its end
        elif os.read(told, 1) and not asked:
            asked = True  # that was the wish to end
        else:
            return 0
    return code


def main() -> int:
    """Run `mpi_rank.py SECONDS COMMAND`: a rank that has so many seconds to end; the command is one argument.

    Returns the rank's exit code.
    """
    grace_s, command = float(sys.argv[1]), shlex.split(sys.argv[2])
    told, tell = os.pipe()
    guarding = os.fork()
    if guarding == 0:
        os.close(tell)
        os.setsid()
        os._exit(guard(command, told, grace_s))
    os.close(told)
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: SIGTERM when mpirun's daemon is gone
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda signum, frame: os.write(tell, b"."))
    _, status = os.waitpid(guarding, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


if __name__ == "__main__":
    sys.exit(main())

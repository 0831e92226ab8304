"""Run one rank of an MPI job: mpirun starts this program, which starts the rank.

mpirun kills all ranks as soon as one ends with an error, and gives them no time. So horovodrun stops them by SIGUSR1,
which mpirun passes on. This program then sends its rank one SIGTERM, waits until it ends, and stays until horovodrun
ends mpirun. It reports the exit code in a line of standard error. The rank dies with it.

This module imports nothing of Horovod, since it starts with every rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import MutableMapping

ROUTE_TO = "HOROVOD_ROUTE_TO"
_GLOO = "HOROVOD_GLOO_IFACE"
NOTICE = "<horovodrun: rank {} ended {}>"
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_SIGNALS = (signal.SIGCHLD, signal.SIGUSR1)


def choose_interface(environ: MutableMapping[str, str]) -> None:
    """Set the network interface, if the user has not: the one that leads to horovodrun's address in `ROUTE_TO`.

    Without that address, set Gloo's: the one that has the address of the host's name, or else the first but `lo`. Gloo
    itself ends a rank on a host whose name has no address, and believes 127.0.1.1, which Debian gives a host's name.
    """
    names: dict[str, str] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                names.setdefault(socket.inet_ntoa(found[20:24]), name)
        if ROUTE_TO in environ:
            probe.connect((environ[ROUTE_TO], 9))  # sends nothing; any port will do
            if chosen := names.get(probe.getsockname()[0]):
                for variable in (_GLOO, "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include"):
                    environ.setdefault(variable, chosen)
        elif not environ.get(_GLOO):
            address = ""
            with contextlib.suppress(OSError, UnicodeError):
                address = socket.gethostbyname(socket.gethostname())
            others = [name for name in names.values() if name != "lo"]
            environ[_GLOO] = names.get(address) or next(iter(others), "lo")


def end_with_parent(signum: int) -> None:
    """Let the kernel signal this process when its parent is gone (Linux), and unblock signals; call it after fork."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(1, signum)  # PR_SET_PDEATHSIG
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def run(command: list[str], grace_s: float) -> int:
    """Run the rank; return its exit code, as a shell has it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    deadline = math.inf
    rank = subprocess.Popen(
        command,
        start_new_session=True,
        close_fds=False,  # MPICH hands one down
        preexec_fn=lambda: end_with_parent(signal.SIGKILL),
    )
    while rank.poll() is None:
        received = signal.sigtimedwait(_SIGNALS, max(0.0, min(deadline - time.monotonic(), 3600.0)))
        if received is None and time.monotonic() >= deadline:
            rank.kill()
        elif received and received.si_signo == signal.SIGUSR1 and deadline == math.inf:
            deadline = time.monotonic() + grace_s
            rank.terminate()
    code = rank.returncode if rank.returncode >= 0 else 128 - rank.returncode
    number = next((os.environ[name] for name in _RANKS if name in os.environ), "?")
    while True:  # mpirun may cut a line in two
        with contextlib.suppress(OSError):  # horovodrun is gone
            os.write(2, f"{NOTICE.format(number, code)}\n".encode())
        if deadline == math.inf or time.monotonic() > deadline:
            return code
        time.sleep(0.5)


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL)  # mpirun's daemon on this host
    choose_interface(os.environ)
    try:
        code = run(shlex.split(sys.argv[2]), float(sys.argv[1]))
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        code = 127
    sys.exit(code)

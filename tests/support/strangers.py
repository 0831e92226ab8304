"""Another account of this machine, which attacks what the processes of a job listen on."""

from __future__ import annotations

import base64
import encodings.idna  # noqa: F401  # what a connection imports, which another account may not be able to read
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

NOBODY = 65534
NEEDS_ROOT = "" if os.geteuid() == 0 else "another account takes root"


class MakesFile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        return os.open, (str(self._path), os.O_CREAT | os.O_WRONLY)


def as_nobody(work: Callable[[], None]) -> int:
    """Run `work` in a fork of this process that belongs to another account, and return its process number."""
    if (child := os.fork()) > 0:
        return child
    code = 1
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def requests(owned: Path) -> list[bytes]:
    """Return what a stranger sends; `owned` is a file that code of the stranger's would make in the job's name."""
    code = pickle.dumps(MakesFile(owned))
    coded = base64.b64encode(code)
    puts = {
        "worker_addresses/localhost:0": coded,
        "runfunc/func": coded,
        "hvd_train/verdict.0": b"stop",
        "global/0": code,
    }
    puts |= {"last_word/0": b'{"exit_code": 2, "error": "a lie"}', "facts/0": b"{}", "not_met/0": b"a lie"}
    gets = ("heartbeat/0", "leaving/0", "leaving/1", "rank_and_size/localhost:0", "global/0", "may_ask/0")
    signed = f"Horovod-Nonce: {'a' * 32}-1\r\nHorovod-Digest: {'0' * 64}\r\nHorovod-Signature: {'0' * 64}\r\n"
    return [
        os.urandom(500),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(40),
        b"\0" * 16,
        os.urandom(32) + len(code).to_bytes(4, "little") + code,  # as Horovod's services send pickles
        b"PUT /hvd_train/large HTTP/1.0\r\nContent-Length: 400000000\r\n\r\n" + b"x" * 2**20,
        *(
            f"PUT /{name} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            for name, body in puts.items()
        ),
        *(f"GET /{name} HTTP/1.0\r\n\r\n".encode() for name in gets),
        f"DELETE /global/0 HTTP/1.0\r\n{signed}\r\n".encode(),
        b"HEAD /etc/passwd HTTP/1.0\r\n\r\n",
    ]


def attack(address: tuple[str, int], owned: Path) -> None:
    """Say all that a stranger has to say at one port, and leave half a request there, held open for a while."""
    with ExitStack() as held:
        for half in (b"", b"GET /global/0 HTTP/1.0\r\n", b"\0" * 8):
            with suppress(OSError):
                connection = held.enter_context(socket.create_connection(address, 2))
                connection.sendall(half)
        for request in requests(owned):
            with suppress(OSError), socket.create_connection(address, 2) as connection:
                connection.settimeout(2)
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1000)


def listening(process: psutil.Process) -> list[tuple[str, str, int]]:
    """Return name, address and port of everything that a process and those below it listen on, parents first."""
    found = []
    with suppress(psutil.Error):
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                for connection in one.net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        found.append((kind_of(one), connection.laddr.ip, connection.laddr.port))
    return found


def kind_of(process: psutil.Process) -> str:
    """Return what a process of a job is, as SECURITY.md calls it.

    Raises psutil.NoSuchProcess where it is about to become another program.
    """
    line = process.cmdline()
    if not line:
        raise psutil.NoSuchProcess(process.pid)
    names = {Path(word).name for word in line}
    if names & {"mpirun", "orterun", "prterun", "orted", "hydra_pmi_proxy", "mpiexec"}:
        return "mpirun"
    if names & {"horovodrun", "hvd_train.elastic.driver", "hvd_train.elastic.supervisor"}:
        return "launcher"
    return "rank" if "hvd-train" in names else "launcher"


@dataclass
class Siege:
    """Attacks on every port that a job opens while it is under way."""

    ports: set[tuple[str, str, int]] = field(default_factory=set)
    """Name, address and port of what was found."""
    largest: dict[int, int] = field(default_factory=dict)
    """The most memory that each process has had, in bytes."""


@contextmanager
def besieged(job: int, owned: Path) -> Iterator[Siege]:
    """Attack every port that the process `job` and those below it open, as another account, during this block."""
    siege, stop = Siege(), threading.Event()
    attackers: list[int] = []
    known: set[tuple[str, int]] = set()

    def watch() -> None:
        while not stop.is_set():
            with suppress(psutil.Error):
                process = psutil.Process(job)
                for new in listening(process):
                    _, address, port = new
                    if (address, port) in known:  # what the process that has opened it starts has it, too, for a moment
                        continue
                    known.add((address, port))
                    siege.ports.add(new)
                    target = "127.0.0.1" if address in ("0.0.0.0", "::") else address
                    attackers.append(as_nobody(lambda target=target, port=port: attack((target, port), owned)))
                for one in [process, *process.children(recursive=True)]:
                    with suppress(psutil.Error):
                        siege.largest[one.pid] = max(siege.largest.get(one.pid, 0), one.memory_info().rss)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield siege
    finally:
        stop.set()
        thread.join()
        ends = [os.waitpid(attacker, 0)[1] for attacker in attackers]
        assert not any(ends), f"an attacker has failed: {ends}"

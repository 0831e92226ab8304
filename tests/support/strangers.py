"""Another account, on this machine or on others, which attacks what the processes of a job listen on."""

from __future__ import annotations

import base64
import ctypes
import encodings.idna  # noqa: F401  # what a connection imports, which another account may not be able to read
import os
import pickle
import select
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import psutil

from tests.support.hosts import Hosts

NOBODY = 65534
NEEDS_ROOT = "" if os.geteuid() == 0 else "another account takes root"
BODY = 400_000_000
"""The bytes of a body that a stranger announces, and sends until nobody takes them any more."""
_WAIT_S = 2.0
_LISTENS = "0A"  # as /proc writes the state of a connection
_NEW_NETWORK = 0x40000000
_ENTER = ctypes.CDLL(None, use_errno=True).setns


class MakesFile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        return os.open, (str(self._path), os.O_CREAT | os.O_WRONLY)


def as_nobody(work: Callable[[], None], network: int | None = None) -> int:
    """Run `work` in a fork of this process that belongs to another account, and return its process number.

    With `network` it runs in the network of that process.
    """
    if (child := os.fork()) > 0:
        return child
    code = 1
    try:
        if network is not None:
            with open(f"/proc/{network}/ns/net") as file:
                assert _ENTER(file.fileno(), _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
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
        *(
            f"PUT /{name} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            for name, body in puts.items()
        ),
        *(f"GET /{name} HTTP/1.0\r\n\r\n".encode() for name in gets),
        f"DELETE /global/0 HTTP/1.0\r\n{signed}\r\n".encode(),
        b"HEAD /etc/passwd HTTP/1.0\r\n\r\n",
    ]


def attack(address: tuple[str, int], owned: Path) -> None:
    """Say all that a stranger has to say at one port, at once, and hold half a request open there for a while."""
    with ExitStack() as held:
        waiting = []
        for half in (b"", b"GET /global/0 HTTP/1.0\r\n", b"\0" * 8):
            with suppress(OSError):
                held.enter_context(socket.create_connection(address, _WAIT_S)).sendall(half)
        for request in requests(owned):
            with suppress(OSError):
                connection = held.enter_context(socket.create_connection(address, _WAIT_S))
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                waiting.append(connection)
        flood(address)
        deadline = time.monotonic() + _WAIT_S
        while waiting and (left := deadline - time.monotonic()) > 0:
            for answered in select.select(waiting, [], [], left)[0]:
                waiting.remove(answered)


def flood(address: tuple[str, int]) -> None:
    """Announce a large body, and send it as long as somebody takes it."""
    with suppress(OSError), socket.create_connection(address, _WAIT_S) as connection:
        deadline = time.monotonic() + 2 * _WAIT_S
        connection.sendall(f"PUT /hvd_train/large HTTP/1.0\r\nContent-Length: {BODY}\r\n\r\n".encode())
        left, piece = BODY, b"x" * 2**20
        while left > 0 and time.monotonic() < deadline:
            connection.sendall(piece[:left])
            left -= len(piece)


@dataclass(frozen=True)
class Port:
    """Where a process of a job listens."""

    process: str
    """What the process is, as SECURITY.md calls it."""
    address: str
    number: int


def listening(process: int) -> dict[str, tuple[str, int]]:
    """Return address and port of all that is listened on in the network of a process, by the names of the sockets."""
    found = {}
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{process}/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                address, _, port = fields[1].partition(":")
                words = struct.iter_unpack("<I", bytes.fromhex(address))  # the kernel writes each as a number
                packed = b"".join(struct.pack(">I", word) for (word,) in words)
                found[f"socket:[{fields[9]}]"] = socket.inet_ntop(family, packed), int(port, 16)
    return found


def open_files(process: int) -> Iterator[str]:
    """Yield the names of the open files of a process."""
    folder = f"/proc/{process}/fd"
    for number in os.listdir(folder):
        with suppress(OSError):
            yield os.readlink(f"{folder}/{number}")


def kind_of(process: psutil.Process) -> str:
    """Return what a process of a job is, as SECURITY.md calls it.

    Raises psutil.NoSuchProcess where it is about to become another program.
    """
    line = process.cmdline()
    if not line:
        raise psutil.NoSuchProcess(process.pid)
    names = {Path(word).name for word in line}
    if names & {"mpirun", "orterun", "prterun", "orted", "prted", "hydra_pmi_proxy", "mpiexec"}:
        return "mpirun"
    if names & {"srun", "slurmstepd", "slurmd", "slurmctld"} or line[0].startswith("slurmstepd"):
        return "Slurm"
    if names & {"horovodrun", "hvd_train.elastic.driver", "hvd_train.elastic.supervisor"}:
        return "launcher"
    return "rank" if "hvd-train" in names else "launcher"


@dataclass
class Siege:
    """Attacks on every port that a job opens while it is under way."""

    ports: set[Port] = field(default_factory=set)
    """What was found."""
    _began: dict[psutil.Process, int] = field(default_factory=dict)
    """The memory of each process that listens when that was found, in bytes."""
    _largest: dict[psutil.Process, int] = field(default_factory=dict)

    def find(self, process: psutil.Process, port: Port) -> None:
        """Note a port, and the memory of its process when this is its first."""
        self.ports.add(port)
        with suppress(psutil.Error):
            self._began.setdefault(process, process.memory_info().rss)

    def measure(self) -> None:
        """Note the memory of each process that listens, where it is more than before."""
        for process in self._began:
            with suppress(psutil.Error):
                self._largest[process] = max(self._largest.get(process, 0), process.memory_info().rss)

    @property
    def growth(self) -> int:
        """The most bytes by which a process has grown from when its first port was found on."""
        return max((most - self._began[process] for process, most in self._largest.items()), default=0)


def below(job: int) -> Callable[[], Sequence[int]]:
    """Return what finds the processes from `job` on down, parents first."""

    def find() -> Sequence[int]:
        with suppress(psutil.Error):
            process = psutil.Process(job)
            return [one.pid for one in (process, *process.children(recursive=True))]
        return []

    return find


def on(hosts: Hosts) -> Callable[[], Sequence[int]]:
    """Return what finds all processes of these hosts, parents first."""
    own = {os.readlink(f"/proc/{hosts.init(name)}/ns/pid") for name in hosts.inits}
    known: dict[int, bool] = {}

    def find() -> Sequence[int]:
        alive = psutil.pids()
        for gone in known.keys() - set(alive):
            del known[gone]
        for new in set(alive) - known.keys():
            with suppress(OSError):
                known[new] = os.readlink(f"/proc/{new}/ns/pid") in own
        return [one for one in alive if known.get(one)]

    return find


def opened(processes: Sequence[int], known: set[str]) -> Iterator[tuple[psutil.Process, Port, str]]:
    """Yield the ports that these processes listen on, but for the sockets in `known`, which gets them, too.

    Each has its first process, as what that starts has the socket, too, for a moment, and the network where it is.
    """
    networks: dict[str, dict[str, tuple[str, int]]] = {}
    for pid in processes:
        with suppress(OSError, psutil.Error):  # it has ended, or is about to become another program
            network = os.readlink(f"/proc/{pid}/ns/net")
            if network not in networks:
                networks[network] = listening(pid)
            for name in open_files(pid) if networks[network].keys() - known else ():
                if name in networks[network] and name not in known:
                    process = psutil.Process(pid)
                    port = Port(kind_of(process), *networks[network][name])
                    known.add(name)
                    yield process, port, network


def ways(port: Port, network: str, hosts: Hosts | None) -> Iterator[tuple[int | None, str]]:
    """Yield for all who can reach a port a process of their network (None: of this one) and the address for them."""
    anywhere = port.address in ("0.0.0.0", "::")
    here = "127.0.0.1" if anywhere else port.address
    if hosts is None:
        yield None, here
        return
    for name in hosts.inits:
        init = hosts.init(name)
        if os.readlink(f"/proc/{init}/ns/net") == network:
            yield init, here
            owner = name
    if anywhere or not ip_address(port.address).is_loopback:
        for name in hosts.inits.keys() - {owner}:
            yield hosts.init(name), hosts.address(owner)


@contextmanager
def besieged(processes: Callable[[], Sequence[int]], owned: Path, hosts: Hosts | None = None) -> Iterator[Siege]:
    """Attack every port that these processes open, as another account, during this block.

    With `hosts`, whose processes they are, the attacks come from all hosts, and what these listen on before the block
    is let alone.
    """
    siege, stop = Siege(), threading.Event()
    attackers: list[int] = []
    known: set[str] = set()
    if hosts is not None:
        list(opened(processes(), known))

    def watch() -> None:
        while not stop.is_set():
            for process, port, network in opened(processes(), known):
                siege.find(process, port)
                for place, address in ways(port, network, hosts):
                    target = address, port.number
                    attackers.append(as_nobody(lambda target=target: attack(target, owned), place))
            siege.measure()
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

"""Another account, on this machine or another: it attacks the ports of a job, and
reads /proc for its secrets.
"""

import base64
import ctypes

# connections import it; another account may not be able to read it
import encodings.idna  # noqa: F401
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

import psutil

from hvd_train.run_files.ledger import audit
from tests.support.hosts import ROOT, SUBNET, Hosts

OTHER_ACCOUNT = 65534
NEEDS_ROOT = "" if os.geteuid() == 0 else "another account takes root"
_WAIT_S = 2.0
_LISTENS = "0A"  # as /proc writes the state of a connection
_NEW_NETWORK = 0x40000000
_PROGRAM = """
import glob, json, os, select, sys
words = {name: bytes.fromhex(word) for name, word in json.loads(sys.stdin.readline()).items()}
seen = {}
print(os.getuid(), flush=True)
while not select.select([sys.stdin], [], [], 0.003)[0]:
    for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                text = file.read()
        except OSError:
            continue
        for name, word in words.items():
            if word in text:
                seen.setdefault(name, {})[path] = text.replace(b"\\0", b" ").decode("utf-8", "replace")[:300]
print(json.dumps(seen))
"""  # noqa: E501
_ENTER = ctypes.CDLL(None, use_errno=True).setns


def as_other_account(work: Callable[[], None], network: int | None = None) -> int:
    """Run `work` as another account in a fork, in the network of process `network` if
    given; return its number.
    """
    if (child := os.fork()) > 0:
        return child
    try:
        if network is not None:
            with open(f"/proc/{network}/ns/net") as file:
                assert _ENTER(file.fileno(), _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
        os.setgroups([])
        os.setgid(OTHER_ACCOUNT)
        os.setuid(OTHER_ACCOUNT)
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _requests(owned: Path) -> list[bytes]:
    """Return an attacker's requests; their pickle would make the folder `owned`."""
    code = f"cos\nmkdir\n(V{owned}\ntR.".encode()
    coded = base64.b64encode(code)
    puts = {
        "worker_addresses/localhost:0": coded,
        "runfunc/func": coded,
        "hvd_train/verdict.0": b"stop",
        "global/0": code,
        "exit_report/0": b'{"exit_code": 2, "error": "a lie"}',
        "left/0": b'[0, "a lie"]',
        "run_dir/0": b"/",
    }
    gets = ("heartbeat/0", "leaving/0", "leaving/1", "rank_and_size/localhost:0", "global/0")
    signed = (
        f"Horovod-Nonce: {'a' * 32}-1\r\nHorovod-Digest: "
        f"{'0' * 64}\r\nHorovod-Signature: {'0' * 64}\r\n"
    )
    return [
        os.urandom(500),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(40),
        b"\0" * 16,
        # as Horovod's services send pickles
        os.urandom(32) + len(code).to_bytes(4, "little") + code,
        *(
            f"PUT /{name} HTTP/1.0\r\nContent-Length: {len(put)}\r\n\r\n".encode() + put
            for name, put in puts.items()
        ),
        *(f"GET /{name} HTTP/1.0\r\n\r\n".encode() for name in gets),
        f"DELETE /global/0 HTTP/1.0\r\n{signed}\r\n".encode(),
        b"HEAD /etc/passwd HTTP/1.0\r\n\r\n",
    ]


def attack(address: tuple[str, int], owned: Path) -> None:
    """Send all requests to a port at once, and hold half-sent requests open for a while."""
    with ExitStack() as held:
        waiting = []
        for half in (b"", b"GET /global/0 HTTP/1.0\r\n", b"\0" * 8):
            with suppress(OSError):
                held.enter_context(socket.create_connection(address, _WAIT_S)).sendall(half)
        for request in _requests(owned):
            with suppress(OSError):
                connection = held.enter_context(socket.create_connection(address, _WAIT_S))
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                waiting.append(connection)
        deadline = time.monotonic() + _WAIT_S
        while waiting and (left := deadline - time.monotonic()) > 0:
            for answered in select.select(waiting, [], [], left)[0]:
                waiting.remove(answered)


class Port(NamedTuple):
    """A port on which a process of a job listens."""

    process: str  # its name in SECURITY.md
    address: str
    number: int


def listening(process: int) -> dict[str, tuple[str, int]]:
    """Return address and port of each listening socket in a process's network, by socket name."""
    found = {}
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{process}/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                address, _, port = fields[1].partition(":")
                # the kernel writes each as a number
                words = struct.iter_unpack("<I", bytes.fromhex(address))
                packed = b"".join(struct.pack(">I", word) for (word,) in words)
                found[f"socket:[{fields[9]}]"] = socket.inet_ntop(family, packed), int(port, 16)
    return found


def link(path: str) -> str:
    """Return the target of a link in /proc, or "" if it is gone."""
    with suppress(OSError):
        return os.readlink(path)
    return ""


def kind_of(process: psutil.Process) -> str:
    """Return a process's name in SECURITY.md.

    Raises: psutil.NoSuchProcess: if it is changing its program.
    """
    line = process.cmdline()
    if not line:
        raise psutil.NoSuchProcess(process.pid)
    names = {Path(word).name for word in line}
    if names & {"mpirun", "orterun", "prterun", "orted", "hydra_pmi_proxy", "mpiexec"}:
        return "mpirun"
    if "torchrun" in names:
        return "torchrun"
    if names & {"srun", "slurmstepd", "slurmd", "slurmctld"} or line[0].startswith("slurmstepd"):
        return "Slurm"
    is_launcher = names & {"horovodrun", "hvd_train.elastic.driver"}
    return "rank" if "hvd-train" in names and not is_launcher else "launcher"


def below(job: int) -> Callable[[], Sequence[int]]:
    """Return a function that finds `job` and its descendants, parents first."""

    def find() -> Sequence[int]:
        with suppress(psutil.Error):
            process = psutil.Process(job)
            return [one.pid for one in (process, *process.children(recursive=True))]
        return []

    return find


def on(hosts: Hosts) -> Callable[[], Sequence[int]]:
    """Return a function that finds all processes of these hosts, parents first."""
    own = {os.readlink(f"/proc/{hosts.init(name)}/ns/pid") for name in hosts.inits}
    return lambda: [process for process in psutil.pids() if link(f"/proc/{process}/ns/pid") in own]


def opened(processes: Sequence[int], known: set[str]) -> Iterator[tuple[Port, str]]:
    """Yield the port and network of each new listening socket, and add it to `known`.

    Of several processes with the socket, parents come first: a child holds inherited sockets for a
    moment.
    """
    networks = {}  # the listening sockets of each
    for pid in processes:
        with suppress(OSError, psutil.Error):  # it has ended, or is changing its program
            network = os.readlink(f"/proc/{pid}/ns/net")
            if network not in networks:
                networks[network] = listening(pid)
            new = networks[network].keys() - known
            for number in os.listdir(f"/proc/{pid}/fd") if new else ():
                if (name := link(f"/proc/{pid}/fd/{number}")) in new - known:
                    port = Port(kind_of(psutil.Process(pid)), *networks[network][name])
                    known.add(name)
                    yield port, network


def ways(port: Port, network: str, hosts: Hosts | None) -> Iterator[tuple[int | None, str]]:
    """Yield for each network that reaches a port one of its processes (None:
    this one) and the address.
    """
    anywhere = port.address in ("0.0.0.0", "::")
    here = "127.0.0.1" if anywhere else port.address
    if hosts is None:
        yield None, here
        return
    owner = next(
        name for name in hosts.inits if link(f"/proc/{hosts.init(name)}/ns/net") == network
    )
    yield hosts.init(owner), here
    if anywhere or not ip_address(port.address).is_loopback:
        for name in hosts.inits.keys() - {owner}:
            yield hosts.init(name), hosts.address(owner)


@contextmanager
def besieged(
    processes: Callable[[], Sequence[int]], owned: Path, hosts: Hosts | None = None
) -> Iterator[set[Port]]:
    """Attack every port that these processes open, as another account, during this
    block; yield the ports found.

    With `hosts`, all hosts attack the ports that were not open before the block.
    """
    ports = set()
    stop = threading.Event()
    attackers = []
    known = set()
    if hosts is not None:
        list(opened(processes(), known))

    def watch() -> None:
        while not stop.is_set():
            for port, network in opened(processes(), known):
                ports.add(port)
                for place, address in ways(port, network, hosts):
                    target = address, port.number
                    attackers.append(
                        as_other_account(lambda target=target: attack(target, owned), place)
                    )
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield ports
    finally:
        stop.set()
        thread.join()
        ends = [os.waitpid(attacker, 0)[1] for attacker in attackers]
        assert not any(ends), f"an attacker failed: {ends}"


def unharmed(job: str, ports: set[Port], run: Path, code: int, printed: str) -> None:
    """Assert that attacks on a job had no effect, and that SECURITY.md names all its ports."""
    assert code == 0, printed
    assert not (run.parent / "owned").exists(), "code of an attacker ran"
    assert "Traceback" not in printed, printed
    assert audit(run).faults == ()
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    cell = "".join(re.findall(rf"^\| `{re.escape(job)}` \| (\w+ `.*) \|$", text, re.MULTILINE))
    named = {
        (process, address)
        for process, addresses in re.findall(r"(\w+) ((?:`[\w.:]+` ?)+)", cell)
        for address in re.findall(r"`([^`]+)`", addresses)
    }
    found = {
        (one.process, "interface" if one.address.startswith(f"{SUBNET}.") else one.address)
        for one in ports
    }
    assert found <= named


@contextmanager
def spying(words: dict[str, bytes]) -> Iterator[dict[str, dict[str, str]]]:
    """Let another user look for these words repeatedly during this block. Needs root.

    After the block the yielded dict has, for each name that was seen, the places with their texts.
    """
    line = ["setpriv", f"--reuid={OTHER_ACCOUNT}", f"--regid={OTHER_ACCOUNT}", "--clear-groups"]
    line += [str(Path(sys.executable).resolve()), "-I", "-S", "-c", _PROGRAM]
    environment = {"PATH": os.environ["PATH"]}  # not what it is to look for
    seen = {}
    with subprocess.Popen(
        line, stdin=PIPE, stdout=PIPE, text=True, cwd="/", env=environment
    ) as process:
        process.stdin.write(json.dumps({name: word.hex() for name, word in words.items()}) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{OTHER_ACCOUNT}\n"
        try:
            yield seen
        finally:
            output, _ = process.communicate()
        seen.update(json.loads(output))


def spellings(name: str, secret: bytes) -> dict[str, bytes]:
    """Return these bytes plain, in hexadecimal and within base64, as a
    command line may have them.
    """
    words = {name: secret, f"{name} in hexadecimal": secret.hex().encode()}
    for shift in range(3):
        words[f"{name} in base64, {shift}"] = base64.b64encode(bytes(shift) + secret)[
            (8 if shift else 0) : -4
        ]
    return words


def plant_key(folder: Path, key: bytes) -> Path:
    """Return a PYTHONPATH in which each random key of 32 bytes is this one."""
    assert len(key) == 32
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import os\nos.urandom = lambda size, real=os.urandom: {key!r} if size == "
        "32 else real(size)\n"
    )
    return folder

"""The program that the doctor runs on each host of a cluster.

It is sent there as text, so it imports only the standard library. It reads requests from standard input, a JSON object
a line, and answers each with a line of JSON; it ends when its input ends.
"""

from __future__ import annotations

import array
import fcntl
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_SIOCGIFCONF = 0x8912
_CHUNK = 1 << 20


def facts(request: dict[str, Any]) -> dict[str, Any]:
    """Return versions, code, addresses, GPUs and limits of this host.

    request["names"] are host names to look up, request["data"] is a folder to measure, or None.
    """
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "torchvision", "horovod", "hvd_train")},
        "build": _build_record(),
        "code": _digest_of_code(),
        "interfaces": _interfaces(),
        "names": {name: _addresses(name) for name in request["names"]},
        "gpus": _gpus(),
        "shared_memory": _disk("/dev/shm"),  # noqa: S108  # the one place where Linux has it
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "data": None if request["data"] is None else _tree(Path(request["data"])),
    }


def listen(_: dict[str, Any]) -> dict[str, Any]:
    """Accept connections on all interfaces, on a port that the system chooses, and return the port.

    What is sent to it is thrown away; when all of it has come, one byte goes back.
    """
    server = socket.create_server(("", 0))
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    return {"port": server.getsockname()[1]}


def reach(request: dict[str, Any]) -> dict[str, Any]:
    """Send request["bytes"] bytes to a port of another host and wait until they have arrived.

    Returns the seconds that it took without the connecting, or {"error": reason}.
    """
    count = request["bytes"]
    try:
        with socket.create_connection((request["host"], request["port"]), timeout=request["limit_s"]) as connection:
            started = time.perf_counter()
            connection.sendall(struct.pack("!Q", count))
            block = bytes(_CHUNK)
            for start in range(0, count, _CHUNK):
                connection.sendall(block[: count - start])
            if connection.recv(1) != b"!":
                return {"error": "the connection was closed"}
            return {"seconds": time.perf_counter() - started}
    except OSError as error:
        return {"error": error.strerror or str(error)}


def main() -> None:
    """Answer requests until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"facts": facts, "listen": listen, "reach": reach}[request["do"]](request)
        except Exception as error:  # noqa: BLE001  # whatever is wrong with this host is an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def _serve(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_receive, args=(connection,), daemon=True).start()


def _receive(connection: socket.socket) -> None:
    with connection:
        header = connection.recv(8, socket.MSG_WAITALL)
        if len(header) < 8:
            return
        missing = struct.unpack("!Q", header)[0]
        while missing:
            received = len(connection.recv(min(missing, _CHUNK)))
            if not received:
                return
            missing -= received
        connection.sendall(b"!")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _build_record() -> dict[str, Any]:
    folder = _folder("horovod")
    try:
        record: dict[str, Any] = json.loads((folder / "hvd_train_build.json").read_text()) if folder else {}
    except (OSError, ValueError):
        return {}
    return {name: record.get(name) for name in ("key", "mpi", "nccl", "torch")}


def _digest_of_code() -> str | None:
    """Return the digest of the installed hvd_train's code, or None where it is not installed."""
    if _folder("hvd_train") is None:
        return None
    from hvd_train._version import digest_of_code

    return digest_of_code()


def _interfaces() -> dict[str, str]:
    """Return the host's IPv4 addresses, each with the name of its interface."""
    size = 40  # of struct ifreq on 64 bits
    buffer = array.array("B", bytes(size * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        length = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, request))[0]
    entries = [buffer.tobytes()[start : start + size] for start in range(0, length, size)]
    return {socket.inet_ntoa(entry[20:24]): entry[:16].split(b"\0")[0].decode() for entry in entries}


def _addresses(name: str) -> list[str]:
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError:
        return []


def _gpus() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    listing = subprocess.run([program, "--list-gpus"], capture_output=True, text=True, check=False, timeout=20)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def _disk(folder: str) -> list[int] | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return [usage.total, usage.free]


def _tree(root: Path) -> dict[str, int] | None:
    """Return the number of files below a folder and their bytes; None where there is no such folder."""
    if not root.is_dir():
        return None
    count = size = 0
    for folder, _, names in os.walk(root):
        for name in names:
            count += 1
            size += os.stat(os.path.join(folder, name), follow_symlinks=False).st_size
    return {"files": count, "bytes": size}


if __name__ == "__main__":
    main()

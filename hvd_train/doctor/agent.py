"""Report on a host: the doctor runs `python -m hvd_train.doctor.agent` on each.

It prints the facts about its host, and listens on a free port, as Gloo and NCCL do.
For each line of input, a JSON list of [host, port], it prints why it cannot connect to each.
"""

import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from hvd_train import _version

ANSWER = "hvd-train doctor: "
_CONNECT_S, _SMI_S = 5.0, 20.0


def facts() -> dict[str, Any]:
    """Return versions, GPUs and limits of this host."""
    shm = "/dev/shm"  # noqa: S108  # Linux has it here
    return {
        "python": platform.python_version(),
        "prefix": sys.prefix,
        "hvd_train": f"{_version.__version__} (code {_version.digest_of_code()})",
        "folder": str(Path(_version.__file__).parent),
        "torch": next((found.version for found in metadata.distributions(name="torch")), None),
        "horovod": _horovod(),
        "gpus": _gpus(),
        "shared_memory": shutil.disk_usage(shm)[::2] if os.path.isdir(shm) else None,  # total and free bytes
    }


def reach(address: Sequence[Any]) -> str | None:
    """Connect to (host, port), and return the address of the host and why that failed, or None."""
    name, port = address
    found = "no address"
    try:
        found = socket.gethostbyname(name)
        socket.create_connection((found, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return f"{found}: {error.strerror or error}"
    return None


def main() -> None:
    """Print the facts, then answer each line of the input."""
    if sys.path[0] == os.getcwd():  # from -m; the folder may hold an unpacked Horovod
        del sys.path[0]
    with socket.create_server(("", 0), backlog=4096) as server, ThreadPoolExecutor(32) as threads:
        _print({**facts(), "port": server.getsockname()[1]})  # the kernel accepts the connections
        for line in sys.stdin:
            _print({"failures": list(threads.map(reach, json.loads(line)))})


def _print(answer: dict[str, Any]) -> None:
    print(f"\n{ANSWER}{json.dumps(answer)}", flush=True)


def _horovod() -> dict[str, Any] | None:
    """Describe the Horovod that `import horovod` would load, without importing it."""
    if (spec := importlib.util.find_spec("horovod")) is None or spec.origin is None:  # a mere folder has no origin
        return None
    folder = Path(spec.origin).parent
    build = None
    with suppress(OSError, ValueError):
        build = json.loads((folder / "hvd_train_build.json").read_text(encoding="utf-8"))  # B4 puts it into the wheel
    versions = [found.version for found in metadata.distributions(name="horovod", path=[str(folder.parent)])]
    return {"folder": str(folder.parent), "version": versions[0] if versions else "of unknown version", "build": build}


def _gpus() -> dict[str, Any]:
    if (program := shutil.which("nvidia-smi")) is None:
        return {"listed": []}
    query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return {"listed": subprocess.check_output(query, text=True, timeout=_SMI_S).strip().splitlines()}
    except subprocess.SubprocessError as error:
        return {"listed": [], "error": str(getattr(error, "output", "") or error).strip().partition("\n")[0]}


if __name__ == "__main__":
    main()

"""Other hosts over ssh: which host keys it takes, and whether it lets us in where this environment is. No torch."""

from __future__ import annotations

import shlex
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from hvd_train.launch.addresses import is_loopback

_CONFIG_S, _REACH_S, _ANSWER_S = 20.0, 5, 60


def new_keys(name: str) -> list[str]:
    """Return the option of ssh that takes the key of a new host, unless the user's ssh configuration has its own word.

    The patched Horovod (host_keys.py) and horovodrun_scripts/_launch.sh do so, too. Raises OSError without an ssh.
    """
    asked = ["ssh", "-G", "--", name]
    with suppress(subprocess.TimeoutExpired):  # ssh itself will say what is wrong
        done = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CONFIG_S, check=False)
        if b"stricthostkeychecking ask" in done.stdout.splitlines():
            return ["-o", "StrictHostKeyChecking=accept-new"]
    return []


def is_here(name: str) -> bool:
    """Return whether a host name means this machine."""
    return name in ("localhost", socket.gethostname(), socket.getfqdn()) or is_loopback(name)


def problems(names: Sequence[str], program: Path) -> list[str]:
    """Return a line on each host that does not let us in without a password, or where `program` is not.

    All hosts are asked at the same time; this machine is not. A machine without an ssh is a line, too.
    """
    others = [name for name in names if not is_here(name)]
    if not others:
        return []
    try:
        with ThreadPoolExecutor(max_workers=32) as threads:
            found = threads.map(lambda name: _problem(name, program), others)
            return [problem for problem in found if problem]
    except FileNotFoundError:
        return ["there is no ssh on the PATH: apt install openssh-client"]


def _problem(name: str, program: Path) -> str:
    """Return a line on what is wrong with a host; empty where all is well. Raises FileNotFoundError without an ssh."""
    line = ["ssh", "-n", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_REACH_S}", *new_keys(name), "--", name]
    line.append(f"test -x {shlex.quote(str(program))}")
    try:
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", check=False, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return f"{name} lets us in by ssh, but has not answered within {_ANSWER_S} s; try `ssh {name} true`"
    said = done.stderr.strip()
    if done.returncode == 255 and "Host key verification failed" in said:
        if "HOST IDENTIFICATION HAS CHANGED" in said:
            return (
                f"{name} has another ssh host key than the one that is known here, so it may be another machine; "
                f"if you know why, forget the old key: ssh-keygen -R {name}"
            )
        return (
            f"{name} has an ssh host key that is not known here, and your ssh configuration takes no new ones; to "
            f"compare and accept it: ssh -o StrictHostKeyChecking=ask {name} true"
        )
    if done.returncode == 255:
        why = said.splitlines()[-1] if said else "no answer"
        return f"{name} does not let us in by ssh without a password ({why}); try `ssh {name} true`"
    if done.returncode:
        return f"{name} has no {program}: set up the same environment there, or put it on a file system that all share"
    return ""

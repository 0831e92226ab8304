"""Reach other hosts by ssh, as Horovod's launcher does: without a prompt, and with the
user's own configuration.
"""

import os
import shlex
import shutil
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial

from hvd_train.errors import UsageError
from hvd_train.launch.child import output_of, why_failed

_CONNECT_S = 5


def is_here(name: str) -> bool:
    """Return whether a host name means this machine."""
    return name in ("localhost", socket.gethostname(), socket.getfqdn()) or name.startswith("127.")


def options(*hosts: str, connect_s: int = _CONNECT_S) -> list[str]:
    """Return options of ssh: no prompt, and the key of a new host is accepted (not
    of one that has changed).

    If the user's configuration decides about the keys of one of these hosts, it decides for all.
    """
    asks = all(_configured(host).get("stricthostkeychecking") == "ask" for host in hosts)
    new_keys = ["-o", "StrictHostKeyChecking=accept-new"] if hosts and asks else []
    return ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s}", *new_keys]


def command(host: str, words: Sequence[str], *more: str) -> list[str]:
    """Return the command that runs these words on a host, this one or
    another; ssh gets `more` options.
    """
    return (
        list(words)
        if is_here(host)
        else ["ssh", *options(host), *more, "--", host, shlex.join(words)]
    )


def with_our_path(words: Sequence[str]) -> list[str]:
    """Return a command of our programs that imports what this process does, as
    horovodrun lets its ranks.
    """
    path = os.environ.get("PYTHONPATH")
    return [*(["env", f"PYTHONPATH={path}"] if path else []), *words]


def address_of(host: str) -> str | None:
    """Return the IPv4 address of a host by its name or the name in the user's ssh
    configuration; None if unknown.
    """
    for name in (host, _configured(host).get("hostname", host)):
        with suppress(OSError, UnicodeError):
            return socket.gethostbyname(name)
    return None


def check_names(hosts: Sequence[str]) -> None:
    """Raise UsageError for host names that no name service knows, neither as they
    are nor as ssh reads them.
    """
    if unknown := _all(hosts, lambda host: None if _is_known(host) else host):
        raise UsageError(
            f"unknown host {', '.join(unknown)}: fix the name, or add it to DNS or /etc/hosts"
        )


def check(hosts: Sequence[str], program: str) -> None:
    """Raise UsageError, in a line, for hosts that ssh does not reach without a
    password, or that lack `program`.
    """
    check_names(hosts)
    if not all(map(is_here, hosts)) and shutil.which("ssh") is None:
        raise UsageError(
            "there is no ssh on the PATH, to start ranks on other hosts: apt install openssh-client"
        )
    if problems := _all(hosts, partial(_problem, program)):
        raise UsageError("; ".join(problems))


def _all(hosts: Sequence[str], examine: Callable[[str], str | None]) -> list[str]:
    """Examine all hosts but this one at once: a dead one takes seconds."""
    others = [host for host in hosts if not is_here(host)]
    with ThreadPoolExecutor(max(len(others), 1)) as threads:
        return [found for found in threads.map(examine, others) if found]


@cache  # several questions about a host, and a program for each
def _configured(host: str) -> dict[str, str]:
    """Return the user's ssh configuration for a host; empty without ssh."""
    try:
        shown = output_of(["ssh", "-G", "--", host])
    except OSError:
        return {}
    return dict(line.split(" ", 1) for line in shown.stdout.splitlines() if " " in line)


def _is_known(host: str) -> bool:
    is_resolved_by_another = {"proxyjump", "proxycommand"} & _configured(host).keys()
    return bool(is_resolved_by_another or address_of(host))


def _problem(program: str, host: str) -> str | None:
    reply = output_of(command(host, ["test", "-x", program]))
    if reply.returncode == 0:
        return None
    if reply.returncode != 255:
        return (
            f"{host} has no {program}: set up the same environment there, or put it on a file "
            "system that all share"
        )
    if "HOST IDENTIFICATION HAS CHANGED" in reply.stderr and "verification failed" in reply.stderr:
        other = f"{host} has another ssh host key than the known one, so it may be another machine"
        return f"{other}; if you know why, forget the old key: ssh-keygen -R {host}"
    return (
        f"{host} does not let us in by ssh without a password ({why_failed(reply)}): try `ssh "
        f"{host} true`, or leave it out"
    )

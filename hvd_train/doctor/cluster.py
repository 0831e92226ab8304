"""`hvd-train doctor --hosts FILE`: examine a cluster over ssh, with an `agent` on each host."""

import itertools
import json
import os
import shlex
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from subprocess import PIPE
from typing import IO, Any

from hvd_train.doctor.children import ANSWER
from hvd_train.doctor.machine import AGENT, HOST_CHECKS, Facts, Finding, Machine, Trial, run_trial
from hvd_train.launch.client import is_loopback
from hvd_train.launch.hosts import Host
from hvd_train.launch.launcher import program

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=2 -o ServerAliveCountMax=3"
_SSH_S, _ANSWER_S, _TRIAL_S = 20.0, 60.0, 120.0
_SIZES = ("1024", "16384", "262144", "1048576", "8388608", "67108864")


def examine(hosts: Sequence[Host], *, quick: bool) -> list[Finding]:
    """Return all findings about a cluster. Raises OSError without ssh, and UsageError without horovodrun."""
    slots = {host.name: host.slots for host in hosts}
    with ExitStack() as stack, ThreadPoolExecutor(len(hosts)) as threads:
        started = [stack.enter_context(Agent(host.name, [other.name for other in hosts])) for host in hosts]
        answers = list(threads.map(lambda one: one.answer(_ANSWER_S), started))
        findings = [check_reached(host.name, answer.get("error")) for host, answer in zip(hosts, answers, strict=True)]
        answered = [(one, answer) for one, answer in zip(started, answers, strict=True) if "error" not in answer]
        good = [{**answer, "name": one.name, "slots": slots[one.name]} for one, answer in answered]
        if good:
            findings += [*check_same(good), check_names(good), check_gpus(good)]
            checked = [(one["name"], check(Machine(one))) for one in good for check in HOST_CHECKS]
            findings += [replace(it, name=f"{name}: {it.name}") for name, it in checked if it and it.verdict != "ok"]
        if len(good) > 1:
            addresses = [(one["name"], one["port"]) for one in good]
            tried = list(threads.map(lambda pair: pair[0].reach(addresses, _ANSWER_S), answered))
            findings.append(check_connections([one["name"] for one in good], tried))
    if not quick and all(finding.verdict != "broken" for finding in findings):
        ranks = sum(slots.values())
        listed = ",".join(f"{name}:{count}" for name, count in slots.items())
        launch = (program("horovodrun"), "-np", str(ranks), "-H", listed, "--gloo")
        findings.append(run_trial(Trial("allreduce", launch, ranks, ("cpu", *_SIZES)), os.environ, _TRIAL_S))
    return findings


class Agent(AbstractContextManager["Agent"]):
    """An agent that runs on a host, and the pipe to it."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        """Start the agent, over ssh unless the host is this one; it looks up `names`. Raises OSError without ssh."""
        self.name, command = name, [*AGENT, *names]
        if not is_here(name):
            path = os.environ.get("PYTHONPATH")  # horovodrun passes it to its ranks
            there = shlex.join([*(["env", f"PYTHONPATH={path}"] if path else []), *command])
            command = [*SSH.split(), *new_keys(name), "--", name, there]
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed by `__exit__`
        self._process = subprocess.Popen(
            command, stdin=PIPE, stdout=PIPE, stderr=self._errors, encoding="utf-8", errors="replace"
        )

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Wait for the next answer and return it, or {"error": reason}."""
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith(ANSWER):  # a shell's start-up file may print other lines
                    found: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                    return found
            self._process.wait()
        finally:
            timer.cancel()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return {"error": lines[-1] if lines else f"no answer; exit code {self._process.returncode}"}

    def reach(self, addresses: Sequence[tuple[str, int]], limit_s: float) -> dict[str, Any]:
        """Let the agent connect to each (host, port); return its answer, or {"error": reason}."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(addresses) + "\n")
            self._process.stdin.flush()
        return self.answer(limit_s)

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError), self._process, self._errors:
            self._process.kill()  # an agent on another host ends when its input does


def new_keys(name: str) -> list[str]:
    """Return the ssh option that accepts the key of a new host, unless the user has set StrictHostKeyChecking."""
    command = ["ssh", "-G", "--", name]  # as the patched Horovod (remote.py) and horovodrun_scripts/_launch.sh
    with suppress(subprocess.TimeoutExpired):  # the connection will show what is wrong
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SSH_S, check=False)
        if b"stricthostkeychecking ask" in done.stdout.splitlines():
            return ["-o", "StrictHostKeyChecking=accept-new"]
    return []


def is_here(name: str) -> bool:
    """Return whether a host name means this machine."""
    return name in ("localhost", socket.gethostname(), socket.getfqdn()) or is_loopback(name)


def check_reached(name: str, error: str | None) -> Finding:
    """Check that ssh reaches a host without a prompt, and finds this environment."""
    if error is None:
        return Finding(name, "ok", "answers over ssh")
    todo = f"`ssh {name} true` must work without a password: name, network, sshd, and our key in authorized_keys"
    if any(sign in error for sign in ("No such file or directory", "not found", "No module named")):
        todo = "set up the same environment in the same place there, or put it on a file system that all hosts share"
    elif "Host key verification failed" in error:
        todo = f"its key is new or has changed, as if it were another machine; `ssh {name} true` says which; "
        todo += f"to forget an old key: `ssh-keygen -R {name}`"
    return Finding(name, "broken", error, todo)


def check_same(hosts: Sequence[Facts]) -> Iterator[Finding]:
    """Check that each host has the versions of the first one."""
    for kind in ("python", "torch", "horovod", "hvd_train"):
        values = {one["name"]: _version(one[kind]) for one in hosts}
        (name, first), *others = values.items()
        if differ := {other: value for other, value in others if value != first}:
            listed = ", ".join(f"{value} on {other}" for other, value in differ.items())
            todo = f"`make env` in the same checkout on {', '.join(differ)}, or one environment that all hosts share"
            yield Finding(kind, "broken", f"{first} on {name}, but {listed}", todo)
        else:
            yield Finding(kind, "ok", f"{first} on all hosts")


def _version(fact: Any) -> str:
    if isinstance(fact, dict):
        return f"{fact['version']} (build {(fact['build'] or {}).get('key', 'unknown')})"
    return str(fact or "none")


def check_names(hosts: Sequence[Facts]) -> Finding:
    """Check that the name of each host leads to it from each host."""
    wrong = []
    for target, one in itertools.product(hosts, hosts):
        name, found = target["name"], one["names"][target["name"]]
        # On the host itself, Debian's installer maps its name to 127.0.1.1.
        if not any(one is target if is_loopback(it) else it in target["addresses"] for it in found):
            wrong.append(f"{name} is {', '.join(found) or 'unknown'} on {one['name']}, no address of {name}")
    if wrong:
        return Finding("names", "broken", "; ".join(wrong), "fix /etc/hosts (or DNS) on those hosts")
    return Finding("names", "ok", "the name of each host leads to it on all hosts")


def check_gpus(hosts: Sequence[Facts]) -> Finding:
    """Check that each host has a GPU for each slot, or that none has a GPU."""
    counts = [(one["name"], len(one["gpus"]["listed"]), one["slots"]) for one in hosts]
    if not any(count for _, count, _ in counts):
        return Finding("GPUs", "ok", "none: training runs on the CPUs")
    if few := [f"{name} has {count} for {slots} slots" for name, count, slots in counts if count < slots]:
        todo = "fix the host file: a slot for each GPU; or type nvidia-smi there"
        return Finding("GPUs", "broken", ", ".join(few), todo)
    return Finding("GPUs", "ok", ", ".join(f"{name} {count}" for name, count, _ in counts))


def check_connections(names: Sequence[str], answers: Sequence[Facts]) -> Finding:
    """Check that each host can connect to each, by their answers to `reach`."""
    failed = []
    for source, answer in zip(names, answers, strict=True):
        reasons = answer.get("failures") or [answer["error"]] * len(names)
        failed += [f"{source} cannot connect to {to} ({why})" for to, why in zip(names, reasons, strict=True) if why]
    if failed:
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        todo = "open all TCP ports between the hosts: ranks listen on ports that the system chooses"
        return Finding("connections", "broken", "; ".join(failed[:3]) + more, todo)
    return Finding("connections", "ok", f"each of {len(names)} hosts reaches each")

"""`hvd-train doctor --hosts FILE`: examine a cluster over ssh, with an `agent` on each host."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from subprocess import PIPE, STDOUT, Popen
from typing import Any

from hvd_train.doctor import agent
from hvd_train.doctor.machine import Facts, Finding, check_shared_memory, run_trial
from hvd_train.errors import first_few
from hvd_train.launch import ssh
from hvd_train.launch.hosts import Host
from hvd_train.launch.start import horovodrun

_AGENT_S = "120"  # for all answers of an agent


def examine(hosts: Sequence[Host]) -> list[Finding]:
    """Return all findings about a cluster. Raises UsageError without horovodrun."""
    with ExitStack() as stack, ThreadPoolExecutor(len(hosts)) as threads:
        agents = [stack.enter_context(start(host.name)) for host in hosts]
        answers = list(threads.map(answer, agents))
        findings = [check_reached(host.name, it.get("error")) for host, it in zip(hosts, answers, strict=True)]
        answered = [it for it in zip(hosts, agents, answers, strict=True) if "error" not in it[2]]
        good = [{**facts, "name": host.name, "slots": host.slots} for host, _, facts in answered]
        if good:
            findings += [*check_same(good), check_gpus(good)]
            checked = [(one["name"], check_shared_memory(one)) for one in good]
            findings += [replace(it, name=f"{name}: {it.name}") for name, it in checked if it.verdict != "ok"]
        if len(good) > 1:
            addresses = [(one["name"], one["port"]) for one in good]
            tried = list(threads.map(lambda it: reach(it[1], addresses), answered))
            findings.append(check_connections([one["name"] for one in good], tried))
    if all(finding.verdict != "broken" for finding in findings):
        ranks = sum(host.slots for host in hosts)
        launch = tuple(horovodrun(ranks, hosts, "gloo"))
        findings.append(run_trial("allreduce", launch, ranks, os.environ))
    return findings


def start(name: str) -> "Popen[bytes]":
    """Start the agent of a host, over ssh unless the host is this one."""
    path = os.environ.get("PYTHONPATH")  # horovodrun passes it to its ranks
    agent_there = [*(["env", f"PYTHONPATH={path}"] if path else []), sys.executable, "-m", agent.__name__]
    command = ssh.command(name, agent_there, "-o", "ServerAliveInterval=2")
    # It ends when its input does. Without buffers, an input that nobody reads cannot raise an error when it is closed.
    return Popen(["timeout", _AGENT_S, *command], bufsize=0, stdin=PIPE, stdout=PIPE, stderr=STDOUT)


def answer(process: "Popen[bytes]") -> dict[str, Any]:
    """Wait for the next answer of an agent and return it, or {"error": reason}."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        text = line.decode(errors="replace").strip()
        if text.startswith(agent.ANSWER):  # a shell's start-up file may print other lines
            found: dict[str, Any] = json.loads(text.removeprefix(agent.ANSWER))
            return found
        said = text or said
    return {"error": said or f"no answer; exit code {process.wait()}"}


def reach(process: "Popen[bytes]", addresses: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Let an agent connect to each (host, port); return its answer, or {"error": reason}."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(f"{json.dumps(addresses)}\n".encode())
    return answer(process)


def check_reached(name: str, error: str | None) -> Finding:
    """Check that ssh reaches a host without a prompt, and finds this environment."""
    if error is None:
        return Finding(name, "ok", "answers over ssh")
    todo = f"`ssh {name} true` must work without a password: name, network, sshd, and our key in authorized_keys"
    if any(sign in error for sign in ("No such file or directory", "not found", "No module named")):
        todo = "set up the same environment in the same place there, or put it on a file system that all hosts share"
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
        todo = "if that is not its address, fix /etc/hosts (or DNS); else open all TCP ports between the hosts"
        return Finding("connections", "broken", first_few(failed), todo)
    return Finding("connections", "ok", f"each of {len(names)} hosts reaches each")

"""`hvd-train doctor --hosts FILE`: whether a cluster is ready, from its first host over ssh.

An `agent` on each host reports facts about it, listens, and connects to the others; `cluster_findings` judges the
answers.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hvd_train.doctor import agent, questions
from hvd_train.doctor.children import children
from hvd_train.doctor.cluster_findings import (
    HostFacts,
    check_connections,
    check_data,
    check_links,
    check_names,
    check_reached,
    check_resources,
    check_same,
    check_speed,
)
from hvd_train.doctor.findings import Finding
from hvd_train.launch.addresses import is_loopback
from hvd_train.launch.hosts import Host

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=2 -o ServerAliveCountMax=3"
_START_S, _FACTS_S, _REACH_S = 20.0, 60.0, 5.0
_LINK_BYTES = 16 * 2**20
_ALL_PAIRS = 8  # with more hosts than this, each connects to its neighbours and the first host only
ALLREDUCE_LIMIT_S = 120.0


class Agent:
    """An agent that runs on a host, and the pipe to it."""

    def __init__(self, host: Host) -> None:
        """Start the agent, over ssh unless the host is this one. Raises OSError where there is no ssh."""
        self.host = host
        program = [sys.executable, "-u", "-c", Path(agent.__file__).read_text(encoding="utf-8")]
        command = program
        if not is_here(host.name):
            command = [*SSH.split(), *new_keys(host.name), "--", host.name, shlex.join(program)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def ask(self, wait_s: float, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer, or {"error": reason} where none comes within `wait_s` seconds."""
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answers is not None
        try:
            pipe.write(json.dumps(request).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            return {"error": self._last_error()}
        if not select.select([answers], [], [], wait_s)[0]:
            return {"error": f"no answer within {wait_s:.0f} s"}
        line = answers.readline()
        if not line:
            return {"error": self._last_error()}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """End the connection; an agent on another host ends when its input does."""
        self._process.kill()
        self._process.communicate()

    def _last_error(self) -> str:
        try:
            lines = self._process.communicate(timeout=_REACH_S)[1].decode(errors="replace").strip().splitlines()
        except subprocess.TimeoutExpired:
            return "it does not answer"
        return lines[-1] if lines else f"exit code {self._process.returncode}"


def new_keys(name: str) -> list[str]:
    """Return the option of ssh that takes the key of a new host, unless the user's ssh configuration has its own word.

    The patched Horovod (host_keys.py) and horovodrun_scripts/_launch.sh do so, too. Raises OSError without an ssh.
    """
    asked = ["ssh", "-G", "--", name]
    with suppress(subprocess.TimeoutExpired):  # ssh itself will say what is wrong
        done = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=_START_S, check=False)
        if b"stricthostkeychecking ask" in done.stdout.splitlines():
            return ["-o", "StrictHostKeyChecking=accept-new"]
    return []


def is_here(name: str) -> bool:
    """Return whether a host name means this machine."""
    return name in ("localhost", socket.gethostname(), socket.getfqdn()) or is_loopback(name)


def examine(hosts: Sequence[Host], data: Path | None, *, quick: bool, say: Callable[[str], None]) -> list[Finding]:
    """Return all findings about a cluster.

    `data` is a folder that all hosts should have, `quick` leaves out the allreduce, and `say` shows what is being done.
    Raises OSError where there is no ssh on this machine.
    """
    say(f"asking {len(hosts)} hosts")
    with agents(hosts) as started, ThreadPoolExecutor(max_workers=max(1, len(hosts))) as threads:
        names = [host.name for host in hosts]
        answers = list(threads.map(lambda one: _ask_facts(one, names, data), started))
        answering = [answer for answer in answers if isinstance(answer, HostFacts)]
        findings = [check_reached(host, answer) for host, answer in zip(hosts, answers, strict=True)]
        if not answering:
            return findings
        findings += check_same(answering)
        findings += [check_names(answering), *check_resources(answering)]
        if data is not None:
            findings.append(check_data(answering, data))
        if len(answering) > 1:
            alive = [one for one, answer in zip(started, answers, strict=True) if isinstance(answer, HostFacts)]
            say("connecting the hosts with one another")
            findings += _check_connections(alive, threads)
    if not quick and all(finding.verdict != "broken" for finding in findings):
        say("allreduce over all of them")
        findings.append(_allreduce(hosts))
    return findings


@contextmanager
def agents(hosts: Sequence[Host]) -> Iterator[list[Agent]]:
    """Start an agent on each host for a block, and end all of them with it. Raises OSError where there is no ssh."""
    started = [Agent(host) for host in hosts]
    try:
        yield started
    finally:
        for one in started:
            one.end()


def _ask_facts(one: Agent, names: list[str], data: Path | None) -> HostFacts | str:
    """Return what an agent reports about its host, or the reason why it does not answer."""
    answer = one.ask(_FACTS_S, do="facts", names=names, data=None if data is None else str(data.resolve()))
    if "error" in answer:
        return str(answer["error"])
    return HostFacts(one.host, answer)


def _check_connections(alive: Sequence[Agent], threads: ThreadPoolExecutor) -> list[Finding]:
    """Connect every pair of hosts both ways, on ports that the system chooses as Gloo and NCCL do.

    Then measure one link after the other, so that they do not share what they measure.
    """
    ports = [one.ask(_REACH_S, do="listen") for one in alive]
    pairs = [(a, b) for a in range(len(alive)) for b in range(len(alive)) if a != b]
    if len(alive) > _ALL_PAIRS:
        pairs = [(a, b) for a, b in pairs if 0 in (a, b) or abs(a - b) == 1]

    def reach(pair: tuple[int, int], count: int, limit_s: float) -> dict[str, Any]:
        source, target = pair
        address = {"host": alive[target].host.name, "port": ports[target].get("port", 0)}
        return alive[source].ask(limit_s + 5, do="reach", bytes=count, limit_s=limit_s, **address)

    def from_one(source: int) -> list[tuple[tuple[int, int], dict[str, Any]]]:
        return [(pair, reach(pair, 0, _REACH_S)) for pair in pairs if pair[0] == source]  # one agent answers in turn

    tried = [result for results in threads.map(from_one, range(len(alive))) for result in results]
    named = {pair: (alive[pair[0]].host.name, alive[pair[1]].host.name) for pair in pairs}
    findings = [check_connections([(*named[pair], answer.get("error")) for pair, answer in tried])]
    if findings[0].verdict == "ok":
        seconds = {named[pair]: reach(pair, _LINK_BYTES, 30.0).get("seconds") for pair in pairs}
        findings.append(check_links(seconds, _LINK_BYTES))
    return findings


def _allreduce(hosts: Sequence[Host]) -> Finding:
    """Measure the bandwidth from 1 KB to 64 MB over real ranks, one for each slot, which horovodrun starts."""
    own = str(Path(sys.executable).parent)
    horovodrun = shutil.which("horovodrun", path=os.pathsep.join([own, os.environ.get("PATH", os.defpath)]))
    count = sum(host.slots for host in hosts)
    listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    with children(os.environ) as group:
        launch = [horovodrun or "horovodrun", "-np", str(count), "-H", listed, "--gloo"]
        outcome = group.start([*launch, sys.executable, "-c", questions.BANDWIDTH], ALLREDUCE_LIMIT_S).outcome()
    return check_speed(questions.answer(outcome), count)

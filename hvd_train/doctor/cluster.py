"""`hvd-train doctor --hosts FILE`: whether a cluster is ready, from its first host over ssh.

An `agent` on each host tells what it has, listens, and reaches the others; `cluster_findings` judges the answers.
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
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvd_train.doctor import agent, probe
from hvd_train.doctor.cluster_findings import (
    Told,
    check_clocks,
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
from hvd_train.launch.hosts import Host

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=2 -o ServerAliveCountMax=3 --"
_START_S, _FACTS_S, _REACH_S = 20.0, 60.0, 5.0
_LINK_BYTES = 16 * 2**20
_ALL_PAIRS = 8  # hosts up to which every pair is tried; beyond it each with its neighbours and the first
ALLREDUCE_LIMIT_S = 120.0


class Agent:
    """An agent on a host, and the pipe to it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        program = [sys.executable, "-u", "-c", Path(agent.__file__).read_text(encoding="utf-8")]
        words = program if is_here(host.name) else [*SSH.split(), host.name, shlex.join(program)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def ask(self, wait_s: float, **request: Any) -> dict[str, Any]:
        """The answer; {"error": why} where there is none."""
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answers is not None
        try:
            pipe.write(json.dumps(request).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            return {"error": self._last_words()}
        if not select.select([answers], [], [], wait_s)[0]:
            return {"error": f"no answer within {wait_s:.0f} s"}
        line = answers.readline()
        if not line:
            return {"error": self._last_words()}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """It ends when its input does."""
        self._process.kill()
        self._process.communicate()

    def _last_words(self) -> str:
        try:
            said = self._process.communicate(timeout=_REACH_S)[1].decode(errors="replace").strip().splitlines()
        except subprocess.TimeoutExpired:
            return "it does not answer"
        return said[-1] if said else f"exit code {self._process.returncode}"


def is_here(name: str) -> bool:
    """Whether a host is this one."""
    return name in ("localhost", socket.gethostname(), socket.getfqdn()) or name.startswith("127.")


def examine(hosts: Sequence[Host], data: Path | None, *, quick: bool, say: Callable[[str], None]) -> list[Finding]:
    """All findings about a cluster; `say` is told what is being done."""
    say(f"asking {len(hosts)} hosts")
    with agents(hosts) as started, ThreadPoolExecutor(max_workers=max(1, len(hosts))) as together:
        names = [host.name for host in hosts]
        asked = list(together.map(lambda one: _ask_facts(one, names, data), started))
        told = [answer for answer in asked if isinstance(answer, Told)]
        findings = [check_reached(host, answer) for host, answer in zip(hosts, asked, strict=True)]
        if not told:
            return findings
        findings += check_same(told)
        findings += [check_clocks(told), check_names(told), *check_resources(told)]
        if data is not None:
            findings.append(check_data(told, data))
        if len(told) > 1:
            alive = [one for one, answer in zip(started, asked, strict=True) if isinstance(answer, Told)]
            say("connecting the hosts with one another")
            findings += _connections(alive, together)
    if not quick and all(finding.verdict != "broken" for finding in findings):
        say("allreduce over all of them")
        findings.append(_allreduce(hosts))
    return findings


@contextmanager
def agents(hosts: Sequence[Host]) -> Iterator[list[Agent]]:
    """An agent on each host; afterwards there is none."""
    started = [Agent(host) for host in hosts]
    try:
        yield started
    finally:
        for one in started:
            one.end()


def _ask_facts(one: Agent, names: list[str], data: Path | None) -> Told | str:
    started = one.ask(_START_S, do="clock")  # the first answer takes as long as ssh and Python take to start
    before = time.time()
    clock = started if "error" in started else one.ask(_REACH_S, do="clock")
    after = time.time()
    if "error" in clock:
        return str(clock["error"])
    answer = one.ask(_FACTS_S, do="facts", names=names, data=None if data is None else str(data.resolve()))
    if "error" in answer:
        return str(answer["error"])
    return Told(one.host, answer, clock["time"] - (before + after) / 2, (after - before) / 2)


def _connections(alive: Sequence[Agent], together: ThreadPoolExecutor) -> list[Finding]:
    """Every pair both ways on ports that the system chose, as Gloo and NCCL do; then how fast each link is, in turn."""
    ports = [one.ask(_REACH_S, do="listen") for one in alive]
    pairs = [(a, b) for a in range(len(alive)) for b in range(len(alive)) if a != b]
    if len(alive) > _ALL_PAIRS:
        pairs = [(a, b) for a, b in pairs if 0 in (a, b) or abs(a - b) == 1]

    def reach(pair: tuple[int, int], count: int, limit_s: float) -> dict[str, Any]:
        source, target = pair
        to = {"host": alive[target].host.name, "port": ports[target].get("port", 0)}
        return alive[source].ask(limit_s + 5, do="reach", bytes=count, limit_s=limit_s, **to)

    def from_one(source: int) -> list[tuple[tuple[int, int], dict[str, Any]]]:
        return [(pair, reach(pair, 0, _REACH_S)) for pair in pairs if pair[0] == source]  # one agent answers in turn

    tried = [result for results in together.map(from_one, range(len(alive))) for result in results]
    named = {pair: (alive[pair[0]].host.name, alive[pair[1]].host.name) for pair in pairs}
    findings = [check_connections([(*named[pair], answer.get("error")) for pair, answer in tried])]
    if findings[0].verdict == "ok":
        seconds = {named[pair]: reach(pair, _LINK_BYTES, 30.0).get("seconds") for pair in pairs}
        findings.append(check_links(seconds, _LINK_BYTES))
    return findings


def _allreduce(hosts: Sequence[Host]) -> Finding:
    """Real ranks, one per slot, started by horovodrun: bandwidth from 1 KB to 64 MB."""
    own = str(Path(sys.executable).parent)
    horovodrun = shutil.which("horovodrun", path=os.pathsep.join([own, os.environ.get("PATH", os.defpath)]))
    count = sum(host.slots for host in hosts)
    listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    with probe.commands(os.environ) as commands:
        words = [horovodrun or "horovodrun", "-np", str(count), "-H", listed, "--gloo"]
        ran = commands.start([*words, sys.executable, "-c", probe.BANDWIDTH], ALLREDUCE_LIMIT_S).result()
    return check_speed(probe.answer(ran), count)

"""`hvd-train why`: looks at the processes of a job on all of its hosts at once, over ssh where they are elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from hvd_train.doctor import hang_agent, hang_stacks
from hvd_train.doctor.cluster import Agent, agents
from hvd_train.doctor.hang_cause import Answer, Launcher, Process, Rank, explain
from hvd_train.launch.hosts import Host
from hvd_train.launch.seat import Seat
from hvd_train.launch.ssh import is_here
from hvd_train.progress import whereabouts

_CONNECT_S = 3.0
_OF_NETWORK = (
    "no answer within",
    "does not answer",
    "timed out",
    "No route",
    "unreachable",
    "refused",
    "not responding",
)
_MOST_PAIRS = 64


@dataclass(frozen=True)
class HostState:
    """What a host of the job has to do beside it."""

    load: float
    """Processes that ran or wanted to, over the last minute."""
    cores: int
    memory: tuple[int, int]
    """Bytes, in all and available."""
    pressure: Mapping[str, float]
    """How many percent of the last ten seconds something waited for cpu, io or memory."""
    network: Mapping[str, int]
    """Bytes received and sent within a second, and segments of TCP that were sent again."""


@dataclass(frozen=True)
class Seen:
    """All that was seen of a job."""

    answer: Answer
    ranks: tuple[Rank, ...]
    launcher: Launcher | None
    hosts: Mapping[str, HostState] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        """Whether there is something of the job, as far as it could be looked for."""
        return self.launcher is not None or any(rank.process is not None or rank.silence for rank in self.ranks)


def look(seats: Sequence[Seat], timeout_s: float) -> Seen:
    """Look at all ranks of a job, each at its seat, and say what keeps them from going on.

    A host that has not answered after `timeout_s` seconds is one that does not answer. Raises OSError where there is no
    ssh on this machine, and one is needed.
    """
    launcher = next((seat.launcher for seat in seats if seat.launcher is not None), None)
    addresses = {seat.process.host: seat.address for seat in seats}
    if launcher is not None:
        addresses.setdefault(launcher.host, launcher.host)
    hosts = {name: Host(name if is_here(name) else address, 1) for name, address in addresses.items()}
    with (
        agents([*hosts.values()], hang_agent) as started,
        ThreadPoolExecutor(max_workers=min(32, len(hosts))) as threads,
    ):
        of_host = dict(zip(hosts, started, strict=True))

        def ask(host: str) -> dict[str, Any]:
            ranks = {
                number: {"number": seat.process.number, "started": seat.process.started}
                for number, seat in enumerate(seats)
                if seat.process.host == host
            }
            one = launcher if launcher is not None and launcher.host == host else None
            wanted = None if one is None else {"number": one.number, "started": one.started}
            return of_host[host].ask(timeout_s, do="look", ranks=ranks, launcher=wanted)

        answers = dict(zip(hosts, threads.map(ask, hosts), strict=True))
        ranks = tuple(_rank(number, seat, answers[seat.process.host]) for number, seat in enumerate(seats))
        found = None if launcher is None else _launcher(launcher.host, answers[launcher.host])
        code = {place: line for answer in answers.values() for place, line in answer.get("lines", {}).items()}
        answer = explain(ranks, found, code)
        ranks = _with_native(ranks, answer, of_host)
    if answer.kind == "between" and len(hosts) > 1:
        answer = _with_connections(answer, [*hosts.values()])
    states = {host: _state(answer["host"]) for host, answer in answers.items() if "host" in answer}
    return Seen(answer, ranks, found, states)


def _rank(number: int, seat: Seat, answer: Mapping[str, Any]) -> Rank:
    host = seat.process.host
    if "error" in answer:
        reason = str(answer["error"])
        return Rank(number, host, None, silence=reason, out_of_reach=any(word in reason for word in _OF_NETWORK))
    processes = answer["ranks"].get(str(number), [])
    if not processes or processes[0]["number"] != seat.process.number:
        return Rank(number, host, None)  # it may have ended between the looks, and left others behind
    own = processes[0]
    where = None
    if own["record"]:
        try:
            where = whereabouts.read(bytes.fromhex(own["record"]))
        except ValueError:
            where = None  # of another version
    children = tuple(_process(child) for child in processes[1:])
    return Rank(number, host, _process(own), children, where, answer["now"], own["moved"])


def _process(found: Mapping[str, Any]) -> Process:
    call, file = found["call"]
    return Process(
        found["number"],
        found["name"],
        found["state"],
        found["cpu"],
        call,
        file,
        found["kernel"],
        hang_stacks.read(found["stacks"]),
    )


def _launcher(host: str, answer: Mapping[str, Any]) -> Launcher | None:
    found = answer.get("launcher")
    return None if found is None else Launcher(found["name"], host, found["number"], found["state"])


def _state(found: Mapping[str, Any]) -> HostState:
    total, free = found["memory"]
    return HostState(found["load"], found["cores"] or 1, (total, free), found["pressure"], found["network"])


def _with_native(ranks: tuple[Rank, ...], answer: Answer, of_host: Mapping[str, Agent]) -> tuple[Rank, ...]:
    """Return the ranks with the native frames of the first culprit, where py-spy is installed and may read them."""
    culprit = answer.culprits[0] if answer.culprits else None
    if culprit is None or culprit.rank is None or culprit.process is None or culprit.kind == "silent":
        return ranks
    found = of_host[culprit.host].ask(8.0, do="native", number=culprit.process)
    text = str(found.get("text", ""))
    if not text:
        return ranks

    def with_text(process: Process) -> Process:
        return replace(process, native=text) if process.number == culprit.process else process

    rank = ranks[culprit.rank]
    assert rank.process is not None
    told = replace(rank, process=with_text(rank.process), children=tuple(map(with_text, rank.children)))
    return tuple(told if one.number == rank.number else one for one in ranks)


def _with_connections(answer: Answer, hosts: Sequence[Host]) -> Answer:
    """Return the answer with the pairs of hosts that do not reach each other, as new connections find it."""
    with agents(hosts) as started, ThreadPoolExecutor(max_workers=min(32, len(hosts))) as threads:
        ports = [one.ask(_CONNECT_S, do="listen").get("port") for one in started]
        pairs = [(a, b) for a in range(len(hosts)) for b in range(len(hosts)) if a != b and ports[b]][:_MOST_PAIRS]

        def from_one(source: int) -> list[tuple[int, int]]:
            cut: list[tuple[int, int]] = []
            for a, b in pairs:
                if a == source and len(cut) < 1:
                    address = {"host": hosts[b].name, "port": ports[b]}
                    tried = started[a].ask(_CONNECT_S + 1, do="reach", bytes=0, limit_s=_CONNECT_S, **address)
                    cut += [(a, b)] if "error" in tried else []
            return cut

        cut = [pair for pairs in threads.map(from_one, range(len(hosts))) for pair in pairs]
    if not cut:
        return answer
    named = ", ".join(f"{hosts[a].name} does not reach {hosts[b].name}" for a, b in cut[:4])
    sentence = f"{named}; {answer.culprits[0].words}"
    return Answer(sentence, (replace(answer.culprits[0], words=sentence),))

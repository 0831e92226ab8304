"""Checks of a cluster: each turns what its hosts report into a finding, one line of the doctor's table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvd_train.doctor.findings import Finding, check_open_files, check_shared_memory
from hvd_train.launch.addresses import is_loopback
from hvd_train.launch.hosts import Host


@dataclass(frozen=True)
class HostFacts:
    """What the agent on a host reports."""

    host: Host
    facts: Mapping[str, Any]
    """The answer of agent.facts."""


def check_reached(host: Host, answer: object) -> Finding:
    """Check that a host could be reached over ssh without a password, and has Python where this host has it.

    `answer` is the reason, as text, where the host did not answer.
    """
    if not isinstance(answer, str):
        return Finding(host.name, "ok", "answers over ssh")
    if "No such file or directory" in answer or "not found" in answer:
        todo = "set up the same environment in the same place there, or put it on a file system that all hosts share"
        return Finding(host.name, "broken", f"does not have the Python that runs here: {answer}", todo)
    if "Host key verification failed" in answer:
        todo = f"its key is new or has changed, as if it were another machine; `ssh {host.name} true` says which; "
        todo += f"to forget an old key: `ssh-keygen -R {host.name}`"
        return Finding(host.name, "broken", answer, todo)
    todo = f"`ssh {host.name} true` must work without a password: name, network, sshd, and our key in authorized_keys"
    return Finding(host.name, "broken", answer, todo)


def check_same(hosts: Sequence[HostFacts]) -> list[Finding]:
    """Check that versions and code are those of the first host; return a finding for each kind of them."""
    kinds: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
        "python": lambda facts: facts["python"],
        "torch": lambda facts: facts["versions"]["torch"],
        "Horovod": lambda facts: _named(facts["versions"]["horovod"], facts["build"].get("key")),
        "hvd_train": lambda facts: facts["versions"]["hvd_train"],
        "MPI": lambda facts: facts["build"].get("mpi"),
        "NCCL": lambda facts: facts["build"].get("nccl"),
        "code": lambda facts: facts["code"],
    }
    findings = []
    for kind, value_in in kinds.items():
        values = {one.host.name: value_in(one.facts) for one in hosts}
        first = values[hosts[0].host.name]
        others = {name: value for name, value in values.items() if value != first}
        if others:
            listed = ", ".join(f"{value or 'none'} on {name}" for name, value in others.items())
            todo = f"`make env` in the same checkout on {', '.join(others)}, or one environment that all hosts share"
            findings.append(Finding(kind, "broken", f"{first or 'none'} on {hosts[0].host.name}, but {listed}", todo))
        elif kind != "code":
            findings.append(Finding(kind, "ok", f"{first or 'none'} on all hosts"))
        else:
            findings.append(Finding(kind, "ok", "the same hvd_train on all hosts"))
    return findings


def check_names(hosts: Sequence[HostFacts]) -> Finding:
    """Check that each host's name stands for an address of that host, on every host, and not for 127.x.x.x."""
    wrong, interfaces = [], {}
    for target in hosts:
        name, own = target.host.name, target.facts["interfaces"]
        for one in hosts:
            addresses = one.facts["names"].get(name, [])
            if not addresses:
                wrong.append(f"{one.host.name} does not know the name {name}")
            elif len(hosts) > 1 and all(is_loopback(address) for address in addresses):
                wrong.append(f"{name} is {addresses[0]} on {one.host.name}, which no other host can reach")
            elif not set(addresses) & set(own):
                wrong.append(f"{name} is {addresses[0]} on {one.host.name}, an address that {name} does not have")
            else:
                interfaces[name] = own[next(address for address in addresses if address in own)]
    if wrong:
        return Finding("names", "broken", "; ".join(wrong), "mend /etc/hosts (or DNS) on those hosts")
    if len(set(interfaces.values())) > 1:
        listed = ", ".join(f"{interface} on {name}" for name, interface in interfaces.items())
        todo = "do not name one interface for all (HOROVOD_GLOO_IFACE, NCCL_SOCKET_IFNAME); list them all, or none"
        return Finding("network", "warning", f"the hosts' names lead to {listed}", todo)
    return Finding("network", "ok", f"the hosts' names lead to {next(iter(interfaces.values()))} on each")


def check_resources(hosts: Sequence[HostFacts]) -> list[Finding]:
    """Check that each host has GPUs for its slots, or none has any, and enough shared memory and open files."""
    findings = []
    few = [one for one in hosts if 0 < one.facts["gpus"] < one.host.slots]
    without = [one for one in hosts if not one.facts["gpus"]]
    if few:
        listed = ", ".join(f"{one.host.name} has {one.facts['gpus']} for {one.host.slots} slots" for one in few)
        findings.append(Finding("GPUs", "broken", listed, "a slot for each GPU: mend the host file"))
    elif without and len(without) < len(hosts):
        listed = ", ".join(one.host.name for one in without)
        findings.append(
            Finding("GPUs", "broken", f"none on {listed}", "take these hosts out, or see `nvidia-smi` there")
        )
    else:
        listed = ", ".join(f"{one.host.name} {one.facts['gpus']}" for one in hosts)
        findings.append(Finding("GPUs", "ok", "none: training runs on the CPUs" if without else listed))
    for one in hosts:
        sizes = one.facts["shared_memory"]
        memory = check_shared_memory((sizes[0], sizes[1]) if sizes else None)
        for finding in (memory, check_open_files(one.facts["open_files"])):
            if finding.verdict != "ok":
                findings.append(replace(finding, name=f"{one.host.name}: {finding.name}"))
    return findings


def check_data(hosts: Sequence[HostFacts], data: Path) -> Finding:
    """Check that the data folder is on every host, with as many files and bytes as on the first."""
    trees = {one.host.name: one.facts["data"] for one in hosts}
    missing = [name for name, tree in trees.items() if tree is None]
    if missing:
        return Finding("data", "broken", f"{data} is not on {', '.join(missing)}", "copy it there, or share it")
    first = trees[hosts[0].host.name]
    others = [f"{_tree(tree)} on {name}" for name, tree in trees.items() if tree != first]
    if others:
        what = f"{data}: {_tree(first)} on {hosts[0].host.name}, but {', '.join(others)}"
        return Finding("data", "broken", what, "copy it again: ranks that see other samples train on other data")
    return Finding("data", "ok", f"{_tree(first)} in {data} on each host")


def check_connections(tried: Sequence[tuple[str, str, str | None]]) -> Finding:
    """Check attempts to connect, each as (from host, to host, reason why it failed or None)."""
    failed = [
        f"{source} cannot connect to {target} ({reason})" for source, target, reason in tried if reason is not None
    ]
    if failed:
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        todo = "open all TCP ports between the hosts: ranks listen on ports that the system chooses"
        return Finding("connections", "broken", "; ".join(failed[:3]) + more, todo)
    return Finding("connections", "ok", f"{len(tried)} tried, both ways")


def check_links(seconds: Mapping[tuple[str, str], float | None], count: int) -> Finding:
    """Compare the slowest link with the median.

    `seconds` has, by (from host, to host), the time that `count` bytes took, or None where they did not arrive.
    """
    speeds = {pair: count / taken for pair, taken in seconds.items() if taken}
    silent = [pair for pair, taken in seconds.items() if not taken]
    if silent:
        source, target = silent[0]
        return Finding("links", "broken", f"{source} to {target} does not carry {count >> 20} MB", "look at that link")
    (source, target), slowest = min(speeds.items(), key=lambda item: item[1])
    median = sorted(speeds.values())[len(speeds) // 2]
    what = f"slowest: {source} to {target}, {_rate(slowest)} (median: {_rate(median)})"
    if slowest < median / 4:
        todo = f"all ranks wait for it: look at the cables and settings of {source} and {target}, or leave one out"
        return Finding("links", "warning", what, todo)
    return Finding("links", "ok", what)


def check_speed(answer: Mapping[str, Any], ranks: int) -> Finding:
    """Check the allreduces over all `ranks`; answer["times"] has (bytes, seconds) in rising order of bytes."""
    if "error" in answer or answer.get("size") != ranks:
        what = answer.get("error", f"{answer.get('size')} of {ranks} ranks took part")
        return Finding("allreduce", "broken", what, "hvd-train doctor, without --hosts, on each host")
    # Bus bandwidth: what each link carries in a ring, whatever the number of ranks (nccl-tests, PERFORMANCE.md).
    share = 2 * (ranks - 1) / ranks
    rows = [f"{_bytes(count)} {_rate(share * count / seconds)}" for count, seconds in answer["times"]]
    return Finding("allreduce", "ok", f"{ranks} ranks, bus bandwidth: {', '.join(rows)}")


def _named(version: str | None, key: str | None) -> str | None:
    return f"{version} (build {key})" if version and key else version


def _tree(tree: Mapping[str, int]) -> str:
    return f"{tree['files']:,} files of {tree['bytes']:,} bytes"


def _rate(per_second: float) -> str:
    return f"{per_second / 1e9:.2f} GB/s" if per_second >= 1e8 else f"{per_second / 1e6:.1f} MB/s"


def _bytes(count: int) -> str:
    return f"{count >> 20} MB" if count >= 2**20 else f"{count >> 10} KB"

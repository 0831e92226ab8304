"""`hvd-train doctor --hosts FILE`: compare what the doctor finds on each
host, then sum over all slots.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from hvd_train.doctor.machine import Finding, run_trial
from hvd_train.errors import first_few
from hvd_train.launch import ssh
from hvd_train.launch.child import output_of, why_failed
from hvd_train.launch.hosts import Host
from hvd_train.launch.start import horovodrun, program

_SAME = ("python", "hvd_train", "torch", "horovod")
_HOST_S = "600"  # the limits of the doctor's programs on a host are shorter


def examine(hosts: Sequence[Host]) -> list[Finding]:
    """Return all findings about a cluster. Raises UsageError without horovodrun."""
    with ThreadPoolExecutor(len(hosts)) as threads:
        asked = list(threads.map(lambda host: ask(host.name), hosts))
    findings = [reached for reached, _ in asked]
    if found := {host: of_host for host, (_, of_host) in zip(hosts, asked, strict=True) if of_host}:
        findings += [
            *compare({host.name: of_host for host, of_host in found.items()}),
            check_gpus(found),
        ]
    if all(finding.verdict != "broken" for finding in findings):
        findings.append(try_allreduce(hosts))
    return findings


def ask(name: str) -> tuple[Finding, list[Finding]]:
    """Run the doctor on a host, over ssh unless it is this one; return whether that
    worked, and its findings.
    """
    doctor = ssh.with_our_path([program("hvd-train"), "doctor", "--json"])
    command = [
        "timeout",
        "--foreground",
        _HOST_S,
        *ssh.command(name, doctor, "-o", "ServerAliveInterval=5"),
    ]
    done = output_of(command)
    try:
        # a shell's start-up file may print other lines
        report = json.loads(done.stdout[done.stdout.index("{") :])
        return Finding(name, "ok", "the doctor runs there"), [
            Finding(**finding) for finding in report["findings"]
        ]
    except ValueError:
        why = why_failed(done)
    todo = (
        f"`ssh {name} true` must work without a password: name, network, sshd, and our "
        "key in authorized_keys"
    )
    if done.returncode != 255:  # not of ssh
        todo = (
            "set up the same environment in the same place there, or put it on a file system "
            "that all hosts share"
        )
    return Finding(name, "broken", why, todo), []


def compare(found: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """Check that the hosts have the same versions and builds, and return
    what else is not ok on some.
    """
    hosts_of = defaultdict[Finding, list[str]](list)
    for host, findings in found.items():
        for finding in findings:
            hosts_of[finding].append(host)
    by_frequency = sorted(hosts_of, key=lambda finding: -len(hosts_of[finding]))
    for name in _SAME:
        usual, *others = (finding for finding in by_frequency if finding.name == name)
        if others:
            what = ", but ".join(
                f"{it.what} on {first_few(hosts_of[it])}" for it in (usual, *others)
            )
            different = first_few([host for it in others for host in hosts_of[it]])
            todo = (
                f"`make env` in the same checkout on {different}, or one environment "
                "that all hosts share"
            )
            yield Finding(name, "broken", what, todo)
        else:
            yield replace(usual, what=f"{usual.what} on all hosts")
    for finding, hosts in hosts_of.items():
        if finding.verdict != "ok" and finding.name not in _SAME:
            yield replace(finding, name=f"{first_few(hosts)}: {finding.name}")


def check_gpus(found: Mapping[Host, Sequence[Finding]]) -> Finding:
    """Check that each host has a GPU for each slot, or that none has a GPU."""
    seen = [
        (host, it.what.split()[0])
        for host, findings in found.items()
        for it in findings
        if it.name == "GPUs"
    ]
    counts = [(host.name, int(first) if first.isdigit() else 0, host.slots) for host, first in seen]
    if not any(count for _, count, _ in counts):
        return Finding("GPUs", "ok", "none: training runs on the CPUs")
    if few := [
        f"{name} has {count} for {slots} slots" for name, count, slots in counts if count < slots
    ]:
        return Finding(
            "GPUs",
            "broken",
            ", ".join(few),
            "fix the host file: a slot for each GPU; or type nvidia-smi there",
        )
    return Finding("GPUs", "ok", ", ".join(f"{name} {count}" for name, count, _ in counts))


def try_allreduce(hosts: Sequence[Host]) -> Finding:
    """Sum over a rank for each slot; if that fails, name the host of a
    rank that could not connect.
    """
    places = [host.name for host in hosts for _ in range(host.slots)]
    finding = run_trial(
        "allreduce", horovodrun(len(places), hosts, "gloo"), len(places), os.environ
    )
    return replace(
        finding,
        what=re.sub(r"^rank (\d+):", lambda it: f"{places[int(it[1])]}, {it[0]}", finding.what),
    )

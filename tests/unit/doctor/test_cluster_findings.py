"""Findings about a cluster, from facts that a test chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_train.doctor.cluster_findings import (
    HostFacts,
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
from hvd_train.launch.hosts import Host


def host(name: str, slots: int = 2, ahead: float = 0.0, **facts: Any) -> HostFacts:
    """Return the facts of a host that is well, but for these."""
    usual = {
        "interfaces": {"127.0.0.1": "lo", f"10.0.0.{name[1:]}": "eth0"},
        "names": {other: [f"10.0.0.{other[1:]}"] for other in ("h1", "h2", "h3")},
        "gpus": 0,
        "shared_memory": [2**34, 2**33],
        "open_files": 4096,
        "data": {"files": 3, "bytes": 10},
    }
    return HostFacts(Host(name, slots), {**usual, **facts}, ahead, 0.5)


def test_clocks() -> None:
    """A clock may be two seconds off, beyond the uncertainty that the time of the answer leaves."""
    assert check_clocks([host("h1"), host("h2", ahead=2.4)]).verdict == "ok"
    finding = check_clocks([host("h1"), host("h2", ahead=2.6), host("h3", ahead=-30.0)])
    assert (finding.verdict, finding.what) == ("warning", "h2 is 3 s ahead, h3 is 30 s behind")


@pytest.mark.parametrize(
    ("gpus", "verdict", "what"),
    [
        ((0, 0), "ok", "none: training runs on the CPUs"),
        ((2, 4), "ok", "h1 2, h2 4"),
        ((2, 1), "broken", "h2 has 1 for 2 slots"),
        ((2, 0), "broken", "none on h2"),
    ],
)
def test_gpus(gpus: tuple[int, int], verdict: str, what: str) -> None:
    """Each slot of each host has a GPU, or no host has any."""
    (finding,) = check_resources([host(f"h{number}", gpus=count) for number, count in enumerate(gpus, 1)])
    assert (finding.verdict, finding.what) == (verdict, what)


def test_limits_of_one_host() -> None:
    """A limit is named with its host; those of the others are not listed."""
    found = check_resources([host("h1"), host("h2", open_files=256, shared_memory=[2**26, 2**26])])
    assert [finding.name for finding in found] == ["GPUs", "h2: shared memory", "h2: open files"]


def test_names_that_lead_elsewhere() -> None:
    """A name is unknown, or has the address of another machine."""
    other = {"h1": ["10.0.0.1"], "h2": ["10.9.9.9"]}
    finding = check_names([host("h1", names=other), host("h2", names={"h2": ["10.0.0.2"]})])
    assert finding.verdict == "broken"
    assert finding.what == "h2 does not know the name h1; h2 is 10.9.9.9 on h1, an address that h2 does not have"


def test_interfaces_of_other_names() -> None:
    """With one name of an interface for all hosts, one of them would wait for ever."""
    finding = check_names([host("h1"), host("h2", interfaces={"10.0.0.2": "ens3"})])
    assert (finding.verdict, finding.what) == ("warning", "the hosts' names lead to eth0 on h1, ens3 on h2")
    assert "HOROVOD_GLOO_IFACE" in finding.todo


def test_data_that_is_not_everywhere() -> None:
    """A host lacks the data, or has another amount of it."""
    assert check_data([host("h1"), host("h2", data=None)], Path("d")).what == "d is not on h2"
    finding = check_data([host("h1"), host("h2", data={"files": 2, "bytes": 9})], Path("d"))
    assert (finding.verdict, finding.what) == ("broken", "d: 3 files of 10 bytes on h1, but 2 files of 9 bytes on h2")


def test_many_connections_that_fail() -> None:
    """The first three are named, the others counted."""
    tried = [("h1", f"h{number}", "timed out") for number in range(2, 7)]
    finding = check_connections([*tried, ("h2", "h1", None)])
    assert finding.what.endswith("h1 cannot connect to h4 (timed out) and 2 more")


def test_the_slowest_link() -> None:
    """It is always named; far behind the others it is a warning, and broken where it carries nothing."""
    seconds: dict[tuple[str, str], float | None] = {("h1", "h2"): 0.010, ("h2", "h1"): 0.012, ("h1", "h3"): 0.020}
    finding = check_links(seconds, 10**7)
    assert (finding.verdict, finding.what) == ("ok", "slowest: h1 to h3, 0.50 GB/s (median: 0.83 GB/s)")
    assert check_links({**seconds, ("h1", "h3"): 0.5}, 10**7).verdict == "warning"
    assert check_links({**seconds, ("h1", "h3"): None}, 10**7).verdict == "broken"


def test_bus_bandwidth() -> None:
    """It is 2 (n - 1) / n times the bytes per second; where a rank is missing there is none."""
    answer = {"size": 4, "times": [[2**10, 0.001], [2**26, 0.1]]}
    assert check_speed(answer, 4).what == "4 ranks, bus bandwidth: 1 KB 1.5 MB/s, 64 MB 1.01 GB/s"
    assert (check_speed(answer, 8).verdict, check_speed(answer, 8).what) == ("broken", "4 of 8 ranks took part")
    assert check_speed({"error": "no end in 120 s"}, 4).what == "no end in 120 s"


@pytest.mark.parametrize(
    ("answer", "verdict", "todo"),
    [
        (host("h1"), "ok", ""),
        ("bash: /env/bin/python: No such file or directory", "broken", "same environment in the same place"),
        ("Permission denied (publickey).", "broken", "`ssh h1 true` must work without a password"),
        ("Host key verification failed.", "broken", "to forget an old key: `ssh-keygen -R h1`"),
    ],
)
def test_a_host_that_does_not_answer(answer: object, verdict: str, todo: str) -> None:
    """A missing Python, a refused login and a refused host key have each their own advice."""
    finding = check_reached(Host("h1", 2), answer)
    assert (finding.name, finding.verdict) == ("h1", verdict)
    assert todo in finding.todo


def test_versions_that_differ_are_named_with_their_hosts() -> None:
    """All hosts are compared with the first one; what is the same everywhere is said once."""
    usual = {
        "python": "3.11.7",
        "versions": {"torch": "2.15.0", "torchvision": "0.29", "horovod": "0.28.1", "hvd_train": "0.1.0"},
        "build": {"key": "abc", "mpi": None, "nccl": None, "torch": "2.15.0"},
        "code": "digest",
    }
    other = {**usual, "python": "3.10.2", "code": None}
    found = {finding.name: finding for finding in check_same([host("h1", **usual), host("h2", **other)])}
    assert (found["python"].verdict, found["python"].what) == ("broken", "3.11.7 on h1, but 3.10.2 on h2")
    assert found["code"].what == "digest on h1, but none on h2"
    assert found["Horovod"].what == "0.28.1 (build abc) on all hosts"

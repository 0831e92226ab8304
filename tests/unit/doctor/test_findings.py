"""Findings about a machine, its Horovod and a cluster, from given facts."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hvd_train.doctor import cluster
from hvd_train.doctor.machine import MACHINE_CHECKS, Facts, Finding, check_trial
from hvd_train.launch.hosts import Host
from tests.support.launching import write_program

GB = 2**30
PROBE = {
    "version": "2.15.0+cu132",
    "cuda": "13.2",
    "torchvision": "0.29.2",
    "gpus": 0,
    "gpu_warning": "",
}
BUILT_IN = {"gloo": True, "mpi": True, "nccl": True}
BUILD = {
    "torch": PROBE["version"],
    "compiler": "g++ 12.2.0",
    "mpi": "Open MPI 4.1.8 (package index)",
    "patches": [{"name": f"C{number}"} for number in range(1, 13)],
}
SMI = {"listed": ["NVIDIA A100, 580.10", "NVIDIA A100, 580.10"]}


def machine(**others: Any) -> Facts:
    """Return the facts about a healthy machine, except for these."""
    return {
        "gpus": {"listed": []},
        "visible_gpus": None,
        "shared_memory": [8 * GB, 8 * GB],
        "probe": {**PROBE, **BUILT_IN},
        **built(),
        **others,
    }


def probed(**facts: Any) -> Facts:
    return machine(gpus=SMI, probe={**PROBE, **BUILT_IN, **facts})


def built(**facts: Any) -> Facts:
    return {"horovod": {"version": "0.28.1", "folder": "/env", "build": {**BUILD, **facts}}}


def agrees(finding: Finding, verdict: str, says: str) -> None:
    assert finding.verdict == verdict, finding
    assert says in f"{finding.what}\n{finding.todo}", f"{says!r} is not in {finding}"
    assert bool(finding.todo) == (verdict != "ok")


@pytest.mark.parametrize(
    ("examined", "name", "verdict", "says"),
    [
        (machine(), "torch", "ok", "2.15.0+cu132, built for CUDA 13.2; torchvision 0.29.2"),
        (
            machine(probe={"importing": "torch", "error": "killed by SIGILL"}),
            "torch",
            "broken",
            "import torch: killed by SIGILL",
        ),
        (probed(gpus=2), "GPUs", "ok", "2 (NVIDIA A100, 580.10)"),
        (probed(gpu_warning="driver too old"), "GPUs", "broken", "driver too old"),
        (probed(cuda=None), "GPUs", "warning", "it is built for CUDA None"),
        (machine(gpus=SMI, visible_gpus="7"), "GPUs", "warning", "unset CUDA_VISIBLE_DEVICES"),
        (
            machine(),
            "horovod",
            "ok",
            "built with g++ 12.2.0; has Gloo, Open MPI 4.1.8 (package index), NCCL",
        ),
        (machine(horovod=None, probe=PROBE), "horovod", "warning", "make env"),
        (
            machine(**built(patches=[{"name": "C1"}])),
            "horovod",
            "warning",
            "without the patches C12, C2, C3, C4, C5, C6",
        ),
        (
            machine(**built(torch="2.13.0")),
            "horovod",
            "warning",
            "against torch 2.13.0, here is 2.15.0+cu132",
        ),
        (
            machine(probe={**PROBE, "importing": "horovod", "error": "undefined symbol"}),
            "horovod",
            "broken",
            "build_horovod.py --force",
        ),
        (probed(gpus=1, nccl=False), "horovod", "warning", "gradients of GPUs travel"),
        (
            machine(shared_memory=[2**26, 2**26]),
            "shared memory",
            "warning",
            "0.0625 GB in /dev/shm, 0.0625 GB free",
        ),
    ],
)
def test_findings_about_a_machine(examined: Facts, name: str, verdict: str, says: str) -> None:
    found = {finding.name: finding for finding in (check(examined) for check in MACHINE_CHECKS)}
    agrees(found[name], verdict, says)


def gpus(*counts: int) -> Finding:
    checked = [
        MACHINE_CHECKS[1](machine(gpus=SMI, probe={**PROBE, "gpus": count})) for count in counts
    ]
    return cluster.check_gpus({Host(f"h{n}", 2): [one] for n, one in enumerate(checked, 1)})


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (gpus(2, 4), "ok", "h1 2, h2 4"),
        (gpus(2, 0), "broken", "h2 has 0 for 2 slots"),
        (gpus(0, 0), "ok", "CPUs"),
    ],
)
def test_gpus_are_compared_with_slots(finding: Finding, verdict: str, says: str) -> None:
    agrees(finding, verdict, says)


def test_hosts_are_compared() -> None:
    """Most hosts decide which version is right; what else is not ok has
    a line for all its hosts.
    """
    same = [Finding(name, "ok", "1") for name in ("python", "hvd_train", "horovod")]
    full = Finding("shared memory", "warning", "0 GB", "free some")
    usual = [*same, Finding("torch", "ok", "2.1"), full]
    reports = {"h1": [*same, Finding("torch", "ok", "2.0")], "h2": usual, "h3": usual}
    found = {finding.name: finding for finding in cluster.compare(reports)}
    assert len(found) == 5
    agrees(found["python"], "ok", "1 on all hosts")
    says = "2.1 on h2, h3, but 2.0 on h1\n`make env` in the same checkout on h1"
    agrees(found["torch"], "broken", says)
    agrees(found["h2, h3: shared memory"], "warning", "0 GB\nfree some")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("cat report; exit 1", ""),
        ("echo No such file or directory >&2; exit 127", "same environment in the same place"),
        ("echo Host key verification failed. >&2; exit 255", "`ssh localhost true` must work"),
    ],
)
def test_a_host_without_a_report_is_broken(
    script: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of a host may say that something is broken there, and
    other lines may precede it.
    """
    one = Finding("x", "broken", "y", "z")
    report = json.dumps({"ok": False, "findings": [asdict(one)]}, indent=1)
    Path("report").write_text(f"Welcome\n{report}\n")
    path = write_program(Path.cwd(), "hvd-train", script)
    monkeypatch.setattr(cluster, "program", lambda _: str(path))
    reached, findings = cluster.ask("localhost")
    assert findings == ([] if says else [one])
    agrees(reached, "broken" if says else "ok", says)


def test_a_rank_that_cannot_connect_is_named_with_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cluster, "run_trial", lambda name, *_: Finding(name, "broken", "rank 2: refused", "x")
    )
    agrees(cluster.try_allreduce([Host("h1", 2), Host("h2", 2)]), "broken", "h2, rank 2: refused")


TWO = "horovodrun --gloo", ("/env/horovodrun", "-np", "2", "--gloo"), 2
RIGHT = {"size": 2, "sums": [3.0], "seconds": 5.0, "wrong": []}


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (check_trial(*TWO, RIGHT), "ok", "2 ranks, the sum is right, 5.0 s"),
        (check_trial(*TWO, {**RIGHT, "size": 1}), "broken", "world size 1, not 2"),
        (
            check_trial(*TWO, {**RIGHT, "sums": [1.5, 3.0]}),
            "broken",
            "the sum of 1 to 2 is 1.5, 3.0",
        ),
        (check_trial(*TWO, {**RIGHT, "wrong": [1]}), "broken", "rank 1: its machine computes"),
        (check_trial(*TWO, {**RIGHT, "error": "shutdown"}), "broken", "horovodrun -np 2"),
    ],
)
def test_an_allreduce_counts_only_with_all_ranks_and_the_right_sum(
    finding: Finding, verdict: str, says: str
) -> None:
    agrees(finding, verdict, says)

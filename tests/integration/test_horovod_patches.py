"""Horovod's patches to its core (but C6, which needs GPUs), L3, L5, L7, L8 and S3,
shown by real processes. C9 and C14 are measured by benchmarks.growth; L1: test_training.py.

HVD_TRAIN_TEST_PYTHON may name the Python of another build; with `--without-patches` these tests
fail.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.hosts import missing

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PYTHON = os.environ.get("HVD_TRAIN_TEST_PYTHON", sys.executable)
RANKS = str(Path(__file__).parent / "patch_workers" / "ranks.py")
NO_HOSTS = missing()


def has(what: str) -> bool:
    code = f"import horovod.torch as hvd; assert hvd.{what}_built()"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module", autouse=True)
def _horovod() -> None:
    if not has("gloo"):
        pytest.skip(f"{PYTHON} has no Horovod")


@pytest.fixture(params=["--gloo", "--mpi"])
def controller(request: pytest.FixtureRequest) -> str:
    if request.param == "--mpi" and not has("mpi"):
        pytest.skip("this build has no MPI")
    return str(request.param)


def environment(**changes: object) -> dict[str, str]:
    """Return the environment of a job, without variables of a launcher around this process."""
    own = {"PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": 1}
    return {
        name: str(value)
        for name, value in {**os.environ, **own, **changes}.items()
        if name in changes or not name.startswith(("HOROVOD_", "OMPI_", "PMI"))
    }


def run(
    *command: str, before: Sequence[str] = (), **env: object
) -> subprocess.CompletedProcess[str]:
    line = [*before, PYTHON, *command]
    return subprocess.run(line, env=environment(**env), capture_output=True, text=True, timeout=240)


def run_world(
    size: int, worker: str, before: Sequence[str] = (), **env: object
) -> tuple[list[int], str]:
    """Run ranks over Gloo without horovodrun; return their exit codes and output."""
    result = run(RANKS, "world", str(size), worker, before=before, **env)
    printed = result.stdout + result.stderr
    codes = re.search(r"^EXIT \[(.*)\]$", result.stdout, re.MULTILINE)
    assert codes, printed
    return [int(code) for code in codes[1].split(", ")], printed


def horovodrun(controller: str, worker: str, ranks: int = 2) -> list[str]:
    """Return Python's arguments that run a function of ranks.py by horovodrun."""
    return ["-m", "horovod.runner.launch", controller, "-np", str(ranks), PYTHON, RANKS, worker]


def succeeds(*command: str, **env: object) -> str:
    done = run(*command, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_c1_shutdown_closes_all_connections(tmp_path: Path) -> None:
    codes, printed = run_world(2, "c1_connections", FOLDER=tmp_path)
    assert codes == [0, 0], printed
    assert printed.count("OPEN 0") == 2, printed


KILLED = -signal.SIGKILL
SILENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": 240, "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": 2}
HALFWAY = {"HOROVOD_GLOO_TIMEOUT_SECONDS": 240, "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": 120}
LEFT = {"HOROVOD_ELASTIC": 1, "HOROVOD_FUSION_THRESHOLD": 0, "HOROVOD_GLOO_TIMEOUT_SECONDS": 60}
LEFT["HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS"] = 8
WITHOUT = {"HVD_TRAIN_SHARED_MEMORY": 0}


@pytest.mark.parametrize(
    ("worker", "env", "expected"),
    [
        ("c2_silent_peer", SILENT, [0, KILLED]),
        ("c2_silent_peer", SILENT | WITHOUT, [0, KILLED]),
        ("c5_left_halfway", LEFT, [0, 0, 0]),
        ("c7_c15_half_sums", {}, [0, 0]),
        ("c7_c15_half_sums", WITHOUT, [0, 0]),
        ("c8_lost_peer", {"HOROVOD_GLOO_TIMEOUT_SECONDS": 240}, [0, 0, KILLED]),
        ("c11_half_a_message", {**HALFWAY, "SENDER": 1}, [0, KILLED]),
        ("c11_half_a_message", {**HALFWAY, "SENDER": 0}, [0, KILLED]),
    ],
)
def test_c2_c5_c7_c8_c11_c15_faults_and_sums_over_gloo(
    worker: str, env: dict[str, object], expected: list[int]
) -> None:
    """Each rank finds what its function in ranks.py promises."""
    codes, printed = run_world(len(expected), worker, **env)
    assert "gloo::EnforceNotMet" not in printed, printed
    assert codes == expected, printed


def test_c15_bf16_sums_over_mpi_are_right() -> None:
    if not has("mpi"):
        pytest.skip("this build has no MPI")
    succeeds(*horovodrun("--mpi", "c7_c15_half_sums"))


def test_c3_init_raises_when_a_peer_does_not_come() -> None:
    """The next init() works."""
    printed = succeeds(RANKS, "c3_failed_init")
    assert "RAISED" in printed and "SUM 1.0" in printed


def test_c3_worker_removed_from_the_job_leaves_with_0() -> None:
    printed = succeeds(RANKS, "c3_removed")
    assert "REMOVED" in printed and "STILL HERE" not in printed


def test_c4_stall_check_names_the_missing_rank(tmp_path: Path) -> None:
    reported = tmp_path / "reported"
    command = [PYTHON, RANKS, "world", "2", "c4_stall"]
    env = environment(REPORTED=reported, HOROVOD_STALL_CHECK_TIME_SECONDS=1)
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        text = ""
        for line in process.stdout:
            text += line
            if line.startswith("1: [allreduce.late tensor"):
                reported.touch()
    assert reported.exists(), text
    assert "EXIT [0, 0]" in text


@pytest.mark.parametrize(
    ("ranks", "env"),
    [
        (2, {"SHARED": 1}),
        (3, {"SHARED": 1}),
        (2, {"SHARED": 0, "HVD_TRAIN_SHARED_MEMORY": 0}),
        (2, {"SHARED": 0, "NO_ROOM": 0}),
    ],
)
def test_c8_sums_are_right(ranks: int, env: dict[str, object], controller: str) -> None:
    """Any operation and length is right, also without shared memory or room for it."""
    succeeds(*horovodrun(controller, "c8_sums", ranks), **env)


def test_c10_a_rank_that_waits_for_a_result_sleeps(controller: str) -> None:
    succeeds(*horovodrun(controller, "c10_waits"))


@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "-")
@pytest.mark.parametrize("interface", ["lo", ""])
@pytest.mark.parametrize(
    "known", ["", "127.0.1.1 h.invalid", "0.0.0.0 h.invalid", "192.0.2.1 h.invalid"]
)
def test_c12_the_name_of_the_host_need_not_lead_to_it(
    tmp_path: Path, known: str, interface: str
) -> None:
    """Ranks connect by the chosen interface; without one, a useless host name counts as none."""
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{known}\n")
    script = 'mount --bind "$0" /etc/hosts; hostname h.invalid; exec "$@"'
    host = ["unshare", "--uts", "--mount", "sh", "-ec", script, str(tmp_path / "hosts")]
    codes, printed = run_world(2, "c12_addresses", before=host, INTERFACE=interface)
    assert codes == [0, 0], printed
    assert not interface or printed.count("AT ['127.0.0.1']") == 2, printed


@pytest.mark.parametrize(
    ("says", "limit_s", "error"),
    [("wrong", 60, "is not the rank it was"), ("right", 2, "Timed out waiting")],
)
def test_s3_a_process_at_the_port_of_a_rank_is_not_believed(
    says: str, limit_s: int, error: str
) -> None:
    """A rank sends it nothing and ends with the reason, unless it gives the secret answer."""
    done = run(RANKS, "s3_impostor", SAYS=says, HOROVOD_GLOO_TIMEOUT_SECONDS=limit_s)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "RAISED" in done.stdout, printed
    sent = re.search(r"SENT (\d+)\n", done.stdout)
    assert sent and (sent[1] != "0") == (says == "right"), printed
    assert error in done.stderr, printed


def test_l3_output_of_rank_0_is_plain(controller: str) -> None:
    """Only the standard output of rank 0 has no prefix."""
    done = run(*horovodrun(controller, "l3_lines"))
    lines = done.stdout.splitlines()
    assert "out of 0" in lines
    # mpirun may cut a line
    assert "out of 1" not in lines and any("]<stdout>:out of 1" in line for line in lines)
    assert "error of 0" in done.stderr and "error of 0" not in done.stderr.splitlines()


def test_l8_horovodrun_by_its_path_finds_the_programs_of_its_environment(controller: str) -> None:
    printed = succeeds(
        *horovodrun(controller, "program")[:-3], "hvd-train", "--version", PATH="/usr/bin:/bin"
    )
    assert printed.count("hvd-train 0.1.0") == 2


def test_l5_the_launcher_does_not_import_torch_to_know_its_build(tmp_path: Path) -> None:
    folder = tmp_path / "instead of torch"  # `python -c` would find it in the test's own folder
    folder.mkdir()
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    code = "from horovod.common import util; print(util.gloo_built(), util.mpi_built())"
    assert succeeds("-c", code, PYTHONPATH=folder) == f"True {has('mpi')}\n"


def test_l7_ranks_whose_output_has_no_reader_continue(tmp_path: Path, controller: str) -> None:
    """As in `horovodrun ... | head -1`: the ranks finish silently, for any amount of output."""
    command = [PYTHON, *horovodrun(controller, "l7_many_lines")]
    env = environment(DONE=tmp_path / "done")
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout.readline()
        process.stdout.close()
        try:
            assert process.wait(180) == 0
        finally:
            process.terminate()
    assert (tmp_path / "done").exists()
    written = (tmp_path / "errors").read_text()
    assert "Traceback" not in written and "SIGPIPE" not in written
    assert "error " in written and "1999" in written  # the stream that has a reader is whole

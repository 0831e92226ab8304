"""The changes that patches C1 to C5, C7 to C11, L1, L2, L3, L5, L7 and S3 of Horovod make, shown by real processes.

HVD_TRAIN_TEST_PYTHON names the Python of another environment; with a build of `--without-patches` there, the tests
must fail. C6 needs several GPUs and has no test.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.launching import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PYTHON = os.environ.get("HVD_TRAIN_TEST_PYTHON", sys.executable)
WORKERS = Path(__file__).parent / "patch_workers"


def has(what: str) -> bool:
    """Return whether the Horovod under test was built with this controller."""
    code = f"import horovod.torch as hvd; assert hvd.{what}_built()"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module", autouse=True)
def _horovod() -> None:
    if not has("gloo"):
        pytest.skip(f"{PYTHON} has no Horovod")


CONTROLLERS = ["--gloo", "--mpi"]


@pytest.fixture(params=CONTROLLERS)
def controller(request: pytest.FixtureRequest) -> str:
    if request.param == "--mpi" and not has("mpi"):
        pytest.skip("this build has no MPI")
    return str(request.param)


def environment(**changes: object) -> dict[str, str]:
    """Return the environment of a job, with the tested programs first and without variables of a job around us."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "OMPI_", "PMI"))}
    env["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{env['PATH']}"
    env["OMP_NUM_THREADS"] = "1"
    return {**env, **{name: str(value) for name, value in changes.items()}}


def program(worker: str) -> list[str]:
    """Return the words after `python` that run a file of patch_workers/, or a function of its ranks.py."""
    return [str(WORKERS / worker)] if worker.endswith(".py") else [str(WORKERS / "ranks.py"), worker]


def run_world(num_workers: int, worker: str, **env: object) -> tuple[list[int | None], str]:
    """Run workers over Gloo without horovodrun, and return their exit codes and all that they printed."""
    command = [PYTHON, str(WORKERS / "gloo_world.py"), str(num_workers), "180", *program(worker)]
    result = subprocess.run(command, env=environment(**env), capture_output=True, text=True, check=False, timeout=240)
    printed = result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("EXIT ")]
    assert lines, printed
    return [None if code == "None" else int(code) for code in lines[-1][6:-1].split(", ")], printed


def test_c1_shutdown_closes_all_connections(tmp_path: Path) -> None:
    """After shutdown() a process has no connection to a peer."""
    codes, printed = run_world(2, "c1_connections", FOLDER=tmp_path)
    assert codes == [0, 0], printed
    assert printed.count("OPEN 0") == 2, printed


KILLED = -signal.SIGKILL
SILENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": 240, "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": 2}
HALFWAY = {"HOROVOD_GLOO_TIMEOUT_SECONDS": 240, "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": 120}
LEFT = {"HOROVOD_ELASTIC": 1, "HOROVOD_FUSION_THRESHOLD": 0, "HOROVOD_GLOO_TIMEOUT_SECONDS": 60}
WORLDS: dict[str, tuple[str, dict[str, object], list[int]]] = {
    "operations have a time limit of their own": ("c2_silent_peer", SILENT, [0, KILLED]),
    "without shared memory, too": ("c2_silent_peer", {**SILENT, "HVD_TRAIN_SHARED_MEMORY": 0}, [0, KILLED]),
    "nothing is sent after a broken operation": (
        "c5_left_halfway",
        {**LEFT, "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": 8},
        [0, 0, 0],
    ),
    "fp16 sums are right for any bits": ("c7_fp16_sum", {}, [0, 0]),
    "without shared memory as well": ("c7_fp16_sum", {"HVD_TRAIN_SHARED_MEMORY": 0}, [0, 0]),
    "a rank that dies is noticed": ("c8_lost_peer", {"HOROVOD_GLOO_TIMEOUT_SECONDS": 240}, [0, 0, KILLED]),
    "the sender dies halfway through a message": ("c11_half_a_message", {**HALFWAY, "SENDER": 1}, [0, KILLED]),
    "the receiver does": ("c11_half_a_message", {**HALFWAY, "SENDER": 0}, [0, KILLED]),
}


@pytest.mark.parametrize("name", WORLDS)
def test_c2_c5_c7_c8_c11_faults_and_sums_over_gloo(name: str) -> None:
    """Each rank finds what its function in ranks.py promises."""
    worker, env, expected = WORLDS[name]
    codes, printed = run_world(len(expected), worker, **env)
    assert "gloo::EnforceNotMet" not in printed, printed
    assert codes == expected, printed


def run_worker(worker: str, **env: object) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, *program(worker)]
    return subprocess.run(command, env=environment(**env), capture_output=True, text=True, check=False, timeout=240)


def test_c3_init_raises_when_a_peer_does_not_come() -> None:
    """A failed rendezvous raises an exception in init(), and the next init() works."""
    result = run_worker("c3_failed_init")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "RAISED" in result.stdout
    assert "SUM 1.0" in result.stdout


def test_c3_worker_removed_from_the_job_leaves_with_0() -> None:
    """A worker without which an elastic job goes on ends with exit code 0."""
    result = run_worker("c3_removed")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "REMOVED" in result.stdout
    assert "STILL HERE" not in result.stdout


def test_c4_stall_check_names_the_missing_rank(tmp_path: Path) -> None:
    """With Gloo, the report on a stalled tensor names the rank that did not submit it."""
    reported = tmp_path / "reported"
    command = [PYTHON, str(WORKERS / "gloo_world.py"), "2", "180", *program("c4_stall")]
    env = environment(REPORTED=reported, HOROVOD_STALL_CHECK_TIME_SECONDS=1)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith("1: [allreduce.late tensor"):
                reported.touch()
    text = "".join(printed)
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
    """Of any operation and length, in the order of the ranks, also without shared memory or room for it."""
    done = horovodrun(ranks, controller, "c8_sums", **env)
    assert done.returncode == 0, done.stdout + done.stderr


def test_c9_a_sum_does_not_wait_for_the_clock(controller: str, tmp_path: Path) -> None:
    """A cycle begins as soon as a tensor waits; cycles by the clock alone would take at least 80 s here."""
    assert taken(controller, tmp_path, "sums", HOROVOD_CYCLE_TIME=4000) < 20 * 3.9


def test_c9_cycles_by_the_clock(controller: str, tmp_path: Path) -> None:
    """They are kept if asked for, and by MPI without shared memory, whose collectives would poll while they wait."""
    assert taken(controller, tmp_path, "sums", HOROVOD_CYCLE_TIME=200, HVD_TRAIN_EAGER_CYCLES=0) > 20 * 0.19
    if controller == "--mpi":
        assert taken("--mpi", tmp_path, "sums", HOROVOD_CYCLE_TIME=200, HVD_TRAIN_SHARED_MEMORY=0) > 20 * 0.19


def test_c9_a_rank_with_nothing_to_do_rests(controller: str, tmp_path: Path) -> None:
    """Between sums Horovod leaves the core to the training: its thread wakes up less than every tenth cycle."""
    assert taken(controller, tmp_path, "rests") < 100


@pytest.mark.parametrize("what", ["process set", "join"])
def test_c9_a_rank_that_others_need_keeps_to_the_clock(what: str, controller: str, tmp_path: Path) -> None:
    """A sum over some of the ranks, or after a join, waits at most for the next tick of the others."""
    assert taken(controller, tmp_path, what, HOROVOD_CYCLE_TIME=200) < 60


def taken(controller: str, folder: Path, what: str, **env: object) -> float:
    """Run c9_cycles.py on two ranks, and return the number that rank 0 writes."""
    took = folder / "took"  # not printed: mpirun puts the rank before each piece of a line that it reads
    done = horovodrun(2, controller, "c9_cycles", TOOK=took, WHAT=what, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return float(took.read_text())


def test_c10_who_waits_for_a_result_sleeps(controller: str) -> None:
    """A rank that waits for others leaves its core to them."""
    done = horovodrun(2, controller, "c10_waits")
    assert done.returncode == 0, done.stdout + done.stderr


def test_s3_strangers_are_not_taken_for_peers(tmp_path: Path) -> None:
    """Whoever connects to the ports of ranks that meet, and whatever they say, the ranks find one another."""
    codes, printed = run_world(3, "s3_strangers.py", FOLDER=tmp_path, HOROVOD_GLOO_TIMEOUT_SECONDS=60)
    assert codes == [0, 0, 0], printed
    assert len(re.findall(r"VISITED [1-9]", printed)) == 3, printed


@pytest.mark.parametrize(
    ("says", "limit_s", "error"),
    [
        ("nothing", 2, "Connect timeout"),
        ("wrong", 60, "is not the rank it was"),
        ("half", 60, "Connection closed by"),
        ("right", 2, "Timed out waiting"),
    ],
)
def test_s3_who_has_the_port_of_a_rank_is_not_taken_for_it(says: str, limit_s: int, error: str) -> None:
    """A rank tells it nothing and ends with the reason; only with the answer that ranks alone know is it believed."""
    result = run_worker("s3_impostor.py", SAYS=says, HOROVOD_GLOO_TIMEOUT_SECONDS=limit_s)
    printed = result.stdout + result.stderr
    assert result.returncode == 0, printed
    assert "RAISED" in result.stdout, printed
    told = re.search(r"TOLD (\d+)\n", result.stdout)
    assert told and (told[1] != "0") == (says == "right"), printed
    assert error in result.stderr, printed


def horovodrun(ranks: int, controller: str, worker: str, **env: object) -> subprocess.CompletedProcess[str]:
    """Run a worker by horovodrun on this machine, and return what came of it."""
    command = [PYTHON, "-m", "horovod.runner.launch", controller, "-np", str(ranks), PYTHON, *program(worker)]
    return subprocess.run(command, env=environment(**env), capture_output=True, text=True, check=False, timeout=240)


def job(folder: Path, controller: str, what: str, signum: int = 0, **env: object) -> tuple[int, list[str]]:
    """Run l1_job.py on two ranks, and signal horovodrun when both train; return its exit code and lines on stderr."""
    command = [PYTHON, "-m", "horovod.runner.launch", controller, "-np", "2", PYTHON, str(WORKERS / "l1_job.py")]
    variables, errors = environment(FOLDER=folder, WHAT=what, **env), folder / "errors"
    with errors.open("w") as file:  # a group of its own, so that a signal reaches horovodrun alone
        process = subprocess.Popen(command, env=variables, stderr=file, start_new_session=True)
    try:
        if signum:
            there = [folder / f"pid.{rank}" for rank in (0, 1)]
            wait_for("ranks", lambda: all(path.exists() for path in there) or process.poll() is not None)
            assert process.poll() is None, errors.read_text()
            process.send_signal(signum)
        code = process.wait(240)
        wait_for("the ranks to end", lambda: not living_ranks(folder))
    finally:
        for one in (*living_ranks(folder), process):
            one.kill()
    assert "Traceback" not in errors.read_text()
    return code, errors.read_text().splitlines()


def living_ranks(folder: Path) -> list[psutil.Process]:
    """Return the ranks of `job` that have not ended."""
    living = []
    for path in folder.glob("pid.*"):
        with suppress(psutil.NoSuchProcess, ValueError):  # gone, or the file is being written
            process = psutil.Process(int(path.read_text()))
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [("exit 7", 7, "ended with exit code 7"), ("kill", 137, "was killed by signal 9 (SIGKILL)")],
)
def test_l1_horovodrun_ends_with_the_code_of_the_rank(
    tmp_path: Path, controller: str, what: str, code: int, message: str
) -> None:
    """A failed rank ends the job with its exit code and a line that names it; the others are stopped."""
    status, errors = job(tmp_path, controller, what, HVD_TRAIN_GRACE_SECONDS=100)
    assert status == code, errors
    assert errors[-1] == f"horovodrun: rank 1 on host localhost {message}; the other ranks were stopped"
    assert (tmp_path / "term.0").read_text() == f"{signal.SIGTERM.value}\n"


@pytest.mark.parametrize(
    ("what", "signum", "code"),
    [
        ("stop", signal.SIGINT, 130),
        ("stop", signal.SIGTERM, 143),
        ("stop", signal.SIGKILL, -9),
        ("finish", signal.SIGINT, 0),  # all ranks end with 0
    ],
)
def test_l1_a_signal_lets_the_ranks_finish(tmp_path: Path, controller: str, what: str, signum: int, code: int) -> None:
    """Each rank gets one SIGTERM and the time it needs to commit, and is gone then, also if horovodrun is killed."""
    status, errors = job(tmp_path, controller, what, signum, HVD_TRAIN_GRACE_SECONDS=100)
    assert status == code, errors
    if code in (130, 143):
        name = signal.Signals(signum).name
        assert errors[0] == f"horovodrun: {name}: stopping; the ranks have 100 s to commit what they did"
        assert errors[-1] == f"horovodrun: stopped by {name}; all ranks were stopped"
    for rank in (0, 1):
        assert (tmp_path / f"term.{rank}").read_text() == f"{signal.SIGTERM.value}\n"
        assert (tmp_path / f"committed.{rank}").exists()


def test_l1_a_rank_that_does_not_end_is_killed_after_the_grace_time(tmp_path: Path, controller: str) -> None:
    """A rank that ignores SIGTERM gets SIGKILL after HVD_TRAIN_GRACE_SECONDS."""
    start = time.monotonic()
    status, errors = job(tmp_path, controller, "ignore", signal.SIGINT, HVD_TRAIN_GRACE_SECONDS=1)
    assert status == 130, errors
    assert time.monotonic() - start >= 1
    assert not (tmp_path / "committed.0").exists()


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("# ours\n\nh1 slots=4   # GPUs\n  h2   slots = 2 max_slots=4\nh3\nh4:8\n", "h1:4,h2:2,h3:1,h4:8\n"),
        ("h1 slots=4\nh2 slots=two\n", "line 2"),
        ("# none\n", "names no host"),
    ],
)
def test_l2_host_files(text: str, printed: str, tmp_path: Path) -> None:
    """horovodrun accepts every host file that mpirun accepts; the error about a bad one names its line."""
    path = tmp_path / "hosts"
    path.write_text(text)
    code = "import sys; from horovod.runner.common.util import hosts; print(hosts.parse_host_files(sys.argv[1]))"
    done = subprocess.run([PYTHON, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert printed in done.stdout + done.stderr


@pytest.mark.parametrize(("value", "first"), [("errors", "out of 0"), ("", "[0]<stdout>:out of 0")])
def test_l3_output_of_rank_0_can_stay_plain(value: str, first: str) -> None:
    """With HVD_TRAIN_OUTPUT_PREFIX=errors, stdout of rank 0 has no prefix and all other output has one."""
    command = [PYTHON, "-m", "horovod.runner.launch", "--gloo", "-np", "2", PYTHON, *program("l3_lines")]
    env = environment(HVD_TRAIN_OUTPUT_PREFIX=value)
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=180)
    assert first in result.stdout.splitlines()
    assert "[1]<stdout>:out of 1" in result.stdout
    assert "[0]<stderr>:error of 0" in result.stderr


@pytest.mark.parametrize("part", ["gloo", "mpi"])
def test_l5_the_launcher_does_not_import_torch_to_know_its_build(tmp_path: Path, part: str) -> None:
    """The record of a build says what it has, as the library does, without an import of torch."""
    folder = tmp_path / "instead of torch"
    folder.mkdir()
    (folder / "torch.py").write_text("import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n")
    code = f"from horovod.common import util; print(util.{part}_built())"
    env = environment(PYTHONPATH=f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    result = subprocess.run([PYTHON, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=180)
    assert not (folder / "imported").exists()
    assert result.stdout.strip() == str(has(part))


@pytest.mark.parametrize("gone", ["stdout", "both"])
def test_l7_ranks_whose_output_nobody_reads_go_on(tmp_path: Path, controller: str, gone: str) -> None:
    """As in `horovodrun ... | head -1`: the ranks come to their end, however much they print, and nothing is said."""
    command = [PYTHON, "-m", "horovod.runner.launch", controller, "-np", "2", PYTHON, *program("l7_many_lines")]
    errors = (tmp_path / "errors").open("w+") if gone == "stdout" else subprocess.STDOUT
    with subprocess.Popen(
        command, env=environment(DONE=tmp_path / "done"), stdout=subprocess.PIPE, stderr=errors, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline()
        job.stdout.close()
        try:
            assert job.wait(180) == 0
        finally:
            job.terminate()
    assert (tmp_path / "done").exists()
    if gone == "stdout":
        written = (tmp_path / "errors").read_text()
        assert "Traceback" not in written and "SIGPIPE" not in written
        assert "error " in written and "1999" in written  # what has a reader is still there, to the end

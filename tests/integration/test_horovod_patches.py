"""The changes that patches C1 to C5, C7 to C11, C17, L1 to L3, L5, L7, L8, S3 and T1 make, shown by real processes.

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
from pathlib import Path

import psutil
import pytest

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


def run_world(num_workers: int | str, limit_s: int, worker: str, **env: object) -> tuple[list[int | None], str]:
    """Run workers over Gloo without horovodrun, and return their exit codes and all that they printed.

    With "3+2" workers they believe that they are on two hosts.
    """
    command = [PYTHON, str(WORKERS / "gloo_world.py"), str(num_workers), str(limit_s), str(WORKERS / worker)]
    result = subprocess.run(command, env=environment(**env), capture_output=True, text=True, check=False, timeout=240)
    printed = result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("EXIT ")]
    assert lines, printed
    return [None if code == "None" else int(code) for code in lines[-1][6:-1].split(", ")], printed


def test_c1_shutdown_closes_all_connections() -> None:
    """After shutdown() a process has no connection to a peer."""
    codes, printed = run_world(2, 100, "c1_connections.py")
    assert codes == [0, 0], printed
    assert printed.count("OPEN 0") == 2, printed


@pytest.mark.parametrize("shared_memory", [1, 0])
def test_c2_operations_have_a_time_limit_of_their_own(shared_memory: int) -> None:
    """A silent peer makes an operation fail after the operation time-out, whatever that of the rendezvous."""
    limits = {"HOROVOD_GLOO_TIMEOUT_SECONDS": 60, "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": 2}
    codes, printed = run_world(2, 100, "c2_silent_peer.py", HVD_TRAIN_SHARED_MEMORY=shared_memory, **limits)
    assert codes == [0, -signal.SIGKILL], printed


def run_worker(worker: str, **env: object) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, str(WORKERS / worker)]
    return subprocess.run(command, env=environment(**env), capture_output=True, text=True, check=False, timeout=240)


def test_c3_init_raises_when_a_peer_does_not_come() -> None:
    """A failed rendezvous raises an exception in init(), and the next init() works."""
    result = run_worker("c3_failed_init.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "RAISED" in result.stdout
    assert "SUM 1.0" in result.stdout


def test_c3_worker_removed_from_the_job_leaves_with_0() -> None:
    """A worker without which an elastic job goes on ends with exit code 0."""
    result = run_worker("c3_removed.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "REMOVED" in result.stdout
    assert "STILL HERE" not in result.stdout


def test_c4_stall_check_names_the_missing_rank(tmp_path: Path) -> None:
    """With Gloo, the report on a stalled tensor names the rank that did not submit it."""
    reported = tmp_path / "reported"
    command = [PYTHON, str(WORKERS / "gloo_world.py"), "2", "100", str(WORKERS / "c4_stall.py")]
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


def test_c5_nothing_is_sent_after_a_broken_operation() -> None:
    """If one rank leaves an operation halfway, all ranks get an exception and no process is aborted."""
    env = {"HOROVOD_ELASTIC": 1, "HOROVOD_FUSION_THRESHOLD": 0, "HOROVOD_GLOO_TIMEOUT_SECONDS": 8}
    codes, printed = run_world(3, 150, "c5_left_halfway.py", **env)
    assert "gloo::EnforceNotMet" not in printed, printed
    assert codes == [0, 0, 0], printed


@pytest.mark.parametrize("shared_memory", [1, 0])
def test_c7_fp16_sums_are_right(shared_memory: int) -> None:
    """Sums of fp16 over Gloo are those of IEEE 754 for any bits."""
    codes, printed = run_world(2, 100, "c7_fp16_sum.py", HVD_TRAIN_SHARED_MEMORY=shared_memory)
    assert codes == [0, 0], printed


@pytest.mark.parametrize("shared_memory", [1, 0])
@pytest.mark.parametrize("ranks", [2, 3])
def test_c17_bfloat16_goes_every_way(ranks: int, controller: str, shared_memory: int) -> None:
    """Sums and other reductions of bfloat16, for any bits, are those in float32 rounded once; the rest arrives whole.

    Where ranks differ in the type of a tensor the error names it.
    """
    done = horovodrun(ranks, controller, "c17_bfloat16.py", HVD_TRAIN_SHARED_MEMORY=shared_memory)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Mismatched data types: One rank had type" in done.stdout
    assert "bfloat16" in done.stdout


@pytest.mark.parametrize("ranks", [2, 3])
def test_c8_sums_through_shared_memory_are_right(ranks: int, controller: str) -> None:
    """Sums of any operation and length are those in the order of the ranks."""
    done = horovodrun(ranks, controller, "c8_sums.py", SHARED=1)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("why", ["HVD_TRAIN_SHARED_MEMORY", "NO_ROOM"])
def test_c8_without_shared_memory_sums_go_the_usual_way(why: str, controller: str) -> None:
    """If shared memory is switched off, or rank 0 has no room for it, no rank uses it and sums are right."""
    if (why, controller) == ("NO_ROOM", "--mpi") and (Path(PYTHON).parent / "mpiexec.hydra").exists():
        pytest.skip("MPICH itself does not start without room for shared memory")
    done = horovodrun(2, controller, "c8_sums.py", SHARED=0, **{why: 0})
    assert done.returncode == 0, done.stdout + done.stderr


def test_c8_a_rank_that_dies_is_noticed_at_once() -> None:
    """Ranks that wait for a dead rank's numbers get an exception long before any time limit."""
    codes, printed = run_world(3, 100, "c8_lost_peer.py", HOROVOD_GLOO_TIMEOUT_SECONDS=60)
    assert codes == [0, 0, -signal.SIGKILL], printed


def test_c9_a_sum_does_not_wait_for_the_clock(controller: str, tmp_path: Path) -> None:
    """A cycle begins as soon as a tensor waits, unless cycles by the clock alone are asked for."""
    by_clock, eager = (seconds_of_sums(controller, tmp_path, HVD_TRAIN_EAGER_CYCLES=wanted) for wanted in (0, 1))
    assert by_clock > 20 * 0.19
    assert eager < by_clock / 2


def test_c9_mpi_on_several_hosts_keeps_to_the_clock(tmp_path: Path) -> None:
    """Without shared memory MPI keeps cycles by the clock, since its collectives would poll while they wait."""
    assert seconds_of_sums("--mpi", tmp_path, HVD_TRAIN_SHARED_MEMORY=0) > 20 * 0.19


def test_c9_a_rank_with_nothing_to_do_rests(controller: str, tmp_path: Path) -> None:
    """Between sums Horovod leaves the core to the training; the release wakes up once a millisecond."""
    by_clock, eager = (taken(controller, tmp_path, "c9_rests.py", HVD_TRAIN_EAGER_CYCLES=wanted) for wanted in (0, 1))
    assert eager < by_clock / 3


@pytest.mark.parametrize("what", ["process set", "join"])
def test_c9_a_rank_that_others_need_keeps_to_the_clock(what: str, controller: str, tmp_path: Path) -> None:
    """A sum over some of the ranks, or after a join, waits at most for the next tick of the others."""
    assert taken(controller, tmp_path, "c9_called_on.py", WHAT=what, HOROVOD_CYCLE_TIME=200) < 5 * 0.2 + 2


def seconds_of_sums(controller: str, folder: Path, **env: object) -> float:
    """Return the seconds that two ranks take for the sums of c9_sums.py, with cycles of 200 ms."""
    return taken(controller, folder, "c9_sums.py", HOROVOD_CYCLE_TIME=200, **env)


def taken(controller: str, folder: Path, worker: str, **env: object) -> float:
    """Run a worker on two ranks, and return the number that rank 0 writes to the file TOOK."""
    took = folder / "took"  # not printed: mpirun puts the rank before each piece of a line that it reads
    done = horovodrun(2, controller, worker, TOOK=took, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return float(took.read_text())


def test_c10_who_waits_for_a_result_sleeps(controller: str) -> None:
    """A rank that waits for others leaves its core to them."""
    done = horovodrun(2, controller, "c10_waits.py")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("sender", [0, 1])
def test_c11_a_peer_that_dies_halfway_through_a_message_is_noticed_at_once(sender: int) -> None:
    """Who has received or sent a part of a message does not wait for the rest of it once the connection is closed."""
    limits = {"HOROVOD_GLOO_TIMEOUT_SECONDS": 60, "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": 15}
    codes, printed = run_world(2, 100, "c11_half_a_message.py", SENDER=sender, **limits)
    assert codes == [0, -signal.SIGKILL], printed


def test_s3_strangers_are_not_taken_for_peers(tmp_path: Path) -> None:
    """Whoever connects to the ports of ranks that meet, and whatever they say, the ranks find one another."""
    codes, printed = run_world(3, 100, "s3_strangers.py", FOLDER=tmp_path, HOROVOD_GLOO_TIMEOUT_SECONDS=10)
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
    command = [PYTHON, "-m", "horovod.runner.launch", controller, "-np", str(ranks), PYTHON, str(WORKERS / worker)]
    return subprocess.run(command, env=environment(**env), capture_output=True, text=True, check=False, timeout=240)


class Job:
    """A horovodrun job of two ranks, which write their process ids and the signals they get to a folder."""

    def __init__(self, folder: Path, controller: str, what: str, **env: object) -> None:
        self.folder = folder
        command = [PYTHON, "-m", "horovod.runner.launch", controller, "-np", "2", PYTHON, str(WORKERS / "l1_job.py")]
        # A group of its own, so that a signal reaches horovodrun alone.
        self.process = subprocess.Popen(
            command,
            env=environment(FOLDER=folder, WHAT=what, **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_workers(self) -> None:
        deadline = time.monotonic() + 120
        while not all((self.folder / f"pid.{rank}").exists() for rank in (0, 1)):
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.process.kill()  # the workers' guards see it and end them
                pytest.fail(f"the workers did not start: {self.process.communicate()}")
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        """Wait for the end and return exit code and stderr. Workers that are left are killed, and an error."""
        _, errors = self.process.communicate(timeout=240)
        deadline = time.monotonic() + 5
        while self.living_workers() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = self.living_workers()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "workers were left running"
        return self.process.returncode, errors

    def living_workers(self) -> list[int]:
        living = []
        for path in self.folder.glob("pid.*"):
            pid = int(path.read_text())
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                living.append(pid)
        return living


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        ("exit 2", 2, "ended with exit code 2"),
        ("exit 7", 7, "ended with exit code 7"),
        ("kill", 137, "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_l1_horovodrun_ends_with_the_workers_code(
    tmp_path: Path, controller: str, what: str, code: int, message: str
) -> None:
    """A failed rank ends the job with its exit code and a line that names it; the others are stopped."""
    start = time.monotonic()
    status, errors = Job(tmp_path, controller, what, HVD_TRAIN_GRACE_SECONDS=100).end()
    assert status == code, errors
    assert time.monotonic() - start < 100  # nobody waits longer than the workers need
    last = [line for line in errors.splitlines() if not line.startswith("  ")][-1]  # below it hvd_train says why (L9)
    assert last == f"horovodrun: rank 1 on host localhost {message}; the other ranks were stopped"
    assert "Traceback" not in errors
    assert (tmp_path / "term.0").read_text() == f"{signal.SIGTERM.value}\n"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_l1_a_signal_lets_the_workers_finish(tmp_path: Path, controller: str, signum: int, code: int) -> None:
    """Ctrl-C is answered at once; each worker gets one SIGTERM and the time it needs to commit, and is gone then."""
    job = Job(tmp_path, controller, "stop", HVD_TRAIN_GRACE_SECONDS=100)
    job.wait_for_workers()
    start = time.monotonic()
    job.process.send_signal(signum)
    name = signal.Signals(signum).name
    assert job.process.stderr is not None
    told = job.process.stderr.readline()
    assert told == f"horovodrun: {name}: stopping; the ranks have 100 s to commit what they did\n"
    assert not (tmp_path / "committed.0").exists()
    status, errors = job.end()
    assert status == code, errors
    assert time.monotonic() - start < 50
    assert errors.splitlines()[-1] == f"horovodrun: stopped by {name}; all ranks were stopped"
    assert "Traceback" not in errors
    for rank in (0, 1):
        assert (tmp_path / f"term.{rank}").read_text() == f"{signal.SIGTERM.value}\n"
        assert (tmp_path / f"committed.{rank}").exists()


def test_l1_a_job_that_finishes_as_the_signal_comes_has_succeeded(tmp_path: Path, controller: str) -> None:
    """Where all workers end with 0 after Ctrl-C, horovodrun ends with 0."""
    job = Job(tmp_path, controller, "finish")
    job.wait_for_workers()
    job.process.send_signal(signal.SIGINT)
    status, errors = job.end()
    assert status == 0, errors
    assert (tmp_path / "committed.0").exists()


def test_l1_workers_commit_when_their_launcher_is_killed(tmp_path: Path, controller: str) -> None:
    """kill -9 of horovodrun: each worker gets one SIGTERM and its time to commit, and then ends."""
    job = Job(tmp_path, controller, "stop")
    job.wait_for_workers()
    job.process.kill()
    job.process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while job.living_workers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert job.end()[0] == -signal.SIGKILL
    for rank in (0, 1):
        assert (tmp_path / f"term.{rank}").read_text() == f"{signal.SIGTERM.value}\n"
        assert (tmp_path / f"committed.{rank}").exists()


def test_l1_a_worker_that_does_not_end_is_killed_after_the_grace_time(tmp_path: Path, controller: str) -> None:
    """A worker that ignores SIGTERM gets SIGKILL after HVD_TRAIN_GRACE_SECONDS."""
    job = Job(tmp_path, controller, "ignore", HVD_TRAIN_GRACE_SECONDS=1)
    job.wait_for_workers()
    start = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    status, errors = job.end()
    assert status == 130, errors
    assert 1 <= time.monotonic() - start < 10
    assert not (tmp_path / "committed.0").exists()


def parse_host_file(path: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from horovod.runner.common.util import hosts; print(hosts.parse_host_files(sys.argv[1]))"
    return subprocess.run([PYTHON, "-c", code, str(path)], capture_output=True, text=True, check=False)


def test_l2_host_files_may_have_comments_and_blank_lines(tmp_path: Path) -> None:
    """horovodrun accepts every host file that mpirun accepts."""
    path = tmp_path / "hosts"
    path.write_text("# the cluster\n\nh1 slots=4   # with four GPUs\n  h2   slots = 2 max_slots=4\nh3\nh4:8\n")
    assert parse_host_file(path).stdout.strip() == "h1:4,h2:2,h3:1,h4:8"


@pytest.mark.parametrize(("text", "message"), [("h1 slots=4\nh2 slots=two\n", "line 2"), ("# none\n", "names no host")])
def test_l2_a_bad_host_file_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    """The error about a bad host file names its line."""
    path = tmp_path / "hosts"
    path.write_text(text)
    assert message in parse_host_file(path).stderr


@pytest.mark.parametrize("variables", [{}, {"HVD_TRAIN_OUTPUT_PREFIX": "all"}], ids=["plain", "all"])
def test_l3_output_of_rank_0_is_plain(variables: dict[str, str], controller: str) -> None:
    """stdout of rank 0 has no prefix unless HVD_TRAIN_OUTPUT_PREFIX=all, and all other output has one."""
    command = [PYTHON, "-m", "horovod.runner.launch", controller, "-np", "2", PYTHON, str(WORKERS / "l3_lines.py")]
    env = environment(**variables)
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=180)
    one = "1," if controller == "--mpi" else ""
    of_rank_0 = next(line for line in result.stdout.splitlines() if "out of 0" in line)
    assert of_rank_0.startswith(f"[{one}0]<stdout>:out of 0") if variables else of_rank_0 == "out of 0"
    assert f"[{one}1]<stdout>:out of 1" in result.stdout
    assert f"[{one}0]<stderr>:error of 0" in result.stderr


def test_l8_a_launcher_that_is_called_by_its_path_finds_what_lies_beside_it(controller: str) -> None:
    """mpirun and the command of the ranks, where the environment is not on the PATH."""
    programs = Path(PYTHON).parent
    command = [str(programs / "horovodrun"), controller, "-np", "2", "python", "-c", "print('here')"]
    env = environment() | {"PATH": "/usr/bin:/bin"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=180)
    assert (result.returncode, result.stdout.count("here")) == (0, 2), result.stderr


@pytest.mark.parametrize("part", ["gloo", "mpi"])
def test_l5_the_launcher_does_not_import_torch_to_know_its_build(tmp_path: Path, part: str) -> None:
    """The record of a build says what it has, as the library does, without an import of torch."""
    folder = tmp_path / "instead of torch"
    folder.mkdir()
    (folder / "torch.py").write_text("import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n")
    code = f"from horovod.common import util; print(util.{part}_built())"
    env = environment(PYTHONPATH=f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    result = subprocess.run([PYTHON, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert not (folder / "imported").exists()
    assert result.stdout.strip() == str(has(part))


@pytest.mark.parametrize("gone", ["stdout", "both"])
def test_l7_ranks_whose_output_nobody_reads_go_on(tmp_path: Path, controller: str, gone: str) -> None:
    """As in `horovodrun ... | head -1`: the ranks come to their end, however much they print, and nothing is said."""
    command = [PYTHON, "-m", "horovod.runner.launch", controller, "-np", "2", PYTHON, str(WORKERS / "l7_many_lines.py")]
    errors = (tmp_path / "errors").open("w+") if gone == "stdout" else subprocess.STDOUT
    with subprocess.Popen(
        [*command, str(tmp_path / "done")], env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline()
        job.stdout.close()
        try:
            assert job.wait(60) == 0
        finally:
            job.terminate()
    assert (tmp_path / "done").exists()
    if gone == "stdout":
        written = (tmp_path / "errors").read_text()
        assert "Traceback" not in written and "SIGPIPE" not in written
        assert "error " in written and "1999" in written  # what has a reader is still there, to the end


def test_t1_each_rank_asks_once_for_the_addresses_of_all() -> None:
    """It writes its own, asks for those of others, and says when it has them; it asks again after 5 s without one."""
    codes, printed = run_world(12, 200, "t1_sum.py")
    assert codes == [0] * 12, printed
    requests, seconds = map(int, re.findall(r"REQUESTS (\d+) (\d+)", printed)[0])
    assert requests <= 12 * (3 + seconds // 5), printed


def test_t1_ranks_of_a_host_and_of_a_process_set_find_one_another() -> None:
    """Two hosts of three and two ranks, two process sets across them: each rank knows its place, and sums are right."""
    codes, printed = run_world("3+2", 200, "t1_meeting.py")
    assert codes == [0] * 5, printed
    places = [(0, 0, 3, 0, 2), (1, 1, 3, 0, 2), (2, 2, 3, 0, 1), (3, 0, 2, 1, 2), (4, 1, 2, 1, 2)]
    sums = [[11111, 101], [11111, 11010], [11111, 101], [11111, 11010], [11111, 11010]]
    for place, numbers in zip(places, sums, strict=True):
        assert f"PLACE {place} SUMS {numbers}" in printed, printed

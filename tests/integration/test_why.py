"""`hvd-train why` on jobs that hang: whose fault it is, on which host, at which line, and within 15 s."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import hangs
from tests.support import hosts as machines
from tests.support.elastic_hosts import NO_HOSTS, job
from tests.support.hosts import Hosts
from tests.support.launching import HVD_TRAIN, launch_line, ranks_of, started, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]


def on_hosts(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that takes hosts of `tests.support.hosts`, and minutes."""
    return pytest.mark.long(pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "-")(test))


_CODE = "--data tests.support.hangs:data --model tests.support.hangs:model --epochs 100000 --batch-size 4"
TRAINING = f"train {_CODE} --log-steps 1 --workers 1 --device cpu --output-dir run".split()
IN_TIME_S = 15.0
ROOT = Path(__file__).parents[2]


def line_of(kind: str) -> str:
    """Return the place in `hangs` where this hang is."""
    path = Path(hangs.__file__)
    lines = path.read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# line of {kind}")]
    return f"{path.name}:{number}"


def steps(folder: Path) -> int:
    """Return how many records the run has written."""
    path = folder / "run" / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def stands_still(folder: Path) -> bool:
    """Return whether the run has come no further for a second."""
    before = steps(folder)
    time.sleep(1.0)
    return steps(folder) == before


def why(command: list[str], folder: Path, **more: Any) -> dict[str, Any]:
    """Return what `hvd-train why` says, which must come in time."""
    begun = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60, **more)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < IN_TIME_S
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def hang(folder: Path, kind: str, rank: int) -> None:
    """Let a rank of the training in a folder hang."""
    os.mkfifo(folder / "fifo")
    first = steps(folder) + 60
    (folder / "hang.new").write_text(f"{kind} {rank} {first}")
    (folder / "hang.new").rename(folder / "hang")
    of_data = kind in ("loader", "files")
    wait_for("the job to stand still", lambda: (of_data or steps(folder) >= first - 10) and stands_still(folder))


@pytest.mark.parametrize(("kind", "found", "place"), [("lock", "lock", "lock"), ("files", "files", "files")])
def test_a_hang_on_one_host(kind: str, found: str, place: str, tmp_path: Path) -> None:
    """The rank, its line and the rank that waits are named; a Python stack comes from a loader process, too."""
    command = launch_line("gloo", 2, HVD_TRAIN, *TRAINING)
    with started(command, tmp_path, tmp_path / "output.txt", {"PYTHONPATH": str(ROOT)}):
        wait_for("some steps", lambda: steps(tmp_path) > 3, limit_s=120)
        hang(tmp_path, kind, 1)
        answer = why([HVD_TRAIN, "why", "run", "--json"], tmp_path)
    first = answer["culprits"][0]
    assert (answer["kind"], first["rank"], first["place"]) == (found, 1, line_of(place)), answer["answer"]
    assert "rank 0 waits for it in the sum of gradients of step" in answer["answer"]


def test_a_rank_tells_by_itself_and_when_it_is_asked(tmp_path: Path) -> None:
    """Before Horovod's limit each rank's log has its stacks and rank 0 says who it is; SIGUSR2 writes them again."""
    variables = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5", "HOROVOD_STALL_CHECK_TIME_SECONDS": "2"}
    variables["HOROVOD_STALL_CHECK_DISABLE"] = "1"  # so that the job is still there to be asked
    variables["PYTHONPATH"] = str(ROOT)
    command = launch_line("gloo", 2, HVD_TRAIN, *TRAINING, "--log-dir", "logs")
    log = tmp_path / "logs" / "rank-1.log"
    with started(command, tmp_path, tmp_path / "output.txt", variables) as launcher:
        wait_for("some steps", lambda: steps(tmp_path) > 3, limit_s=120)
        hang(tmp_path, "lock", 1)
        said = "why this job does not go on: rank 1 on"
        wait_for("rank 0 to say why", lambda: said in (tmp_path / "output.txt").read_text())
        assert "in wait_for_ever" in log.read_text()
        assert "most recent call first" not in (tmp_path / "output.txt").read_text()
        before = log.read_text().count("in wait_for_ever")
        for process in ranks_of(launcher, "train"):
            process.send_signal(signal.SIGUSR2)
        wait_for("the stacks", lambda: log.read_text().count("in wait_for_ever") > before)
        assert launcher.poll() is None
    assert line_of("lock") in (tmp_path / "output.txt").read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Run h1, h2 and h3."""
    with machines.hosts(tmp_path_factory.mktemp("hosts") / "cluster", 3, names=3) as found:
        yield found


@pytest.fixture
def hosts(cluster: Hosts) -> Iterator[Hosts]:
    """Lend them to a test; what hangs on them at its end is killed."""
    yield cluster
    for name in cluster.inits:
        cluster.signal_all(name, signal.SIGKILL)
        wait_for("nothing to run", lambda name=name: len(list(cluster.processes(name))) == 1)


def asked(hosts: Hosts, folder: Path) -> dict[str, Any]:
    """Return what `hvd-train why` says on h1."""
    answer = why(hosts.typed("h1", folder, HVD_TRAIN, "why", "run", "--json"), folder)
    print(answer["answer"])
    return answer


OF_CODE = [("loader", "lock", "lock"), ("lock", "lock", "lock"), ("files", "files", "files"),
           ("skip", "skipped", "skip"), ("loop", "loop", "loop")]  # fmt: skip


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
@pytest.mark.parametrize(("kind", "found", "place"), OF_CODE, ids=[kind for kind, *_ in OF_CODE])
@on_hosts
def test_a_hang_in_the_code_of_a_rank_elsewhere(
    kind: str, found: str, place: str, launcher: str, hosts: Hosts, tmp_path: Path
) -> None:
    """It is looked at over ssh: rank, host and line are named."""
    with started(static(hosts, tmp_path, launcher), tmp_path, tmp_path / "output.txt"):
        wait_for("some steps", lambda: steps(tmp_path) > 3, limit_s=120)
        hang(tmp_path, kind, 2)
        answer = asked(hosts, tmp_path)
    first = answer["culprits"][0]
    assert (answer["kind"], first["rank"], first["host"], first["place"]) == (found, 2, "h3", line_of(place)), answer


@on_hosts
def test_a_rank_that_is_stopped_elsewhere(hosts: Hosts, tmp_path: Path) -> None:
    """It has no stack, but the kernel says that it is stopped, and its record in which phase."""
    with started(static(hosts, tmp_path), tmp_path, tmp_path / "output.txt"):
        wait_for("some steps", lambda: steps(tmp_path) > 3, limit_s=120)
        (worker,) = hosts.workers("h2")
        worker.suspend()
        wait_for("the job to stand still", lambda: stands_still(tmp_path))
        answer = asked(hosts, tmp_path)
    first = answer["culprits"][0]
    assert (answer["kind"], first["rank"], first["host"]) == ("stopped", 1, "h2"), answer["answer"]


@on_hosts
def test_a_link_that_is_cut(hosts: Hosts, tmp_path: Path) -> None:
    """The host that does not answer is named with its rank; the others wait for it."""
    with started(static(hosts, tmp_path), tmp_path, tmp_path / "output.txt"):
        wait_for("some steps", lambda: steps(tmp_path) > 3, limit_s=120)
        hosts.unplug("h3")
        try:
            wait_for("the job to stand still", lambda: stands_still(tmp_path))
            answer = asked(hosts, tmp_path)
        finally:
            hosts.plug("h3")
    first = answer["culprits"][0]
    assert (answer["kind"], first["rank"], first["host"]) == ("silent", 2, "h3"), answer["answer"]


@on_hosts
def test_a_driver_that_is_stopped(hosts: Hosts, tmp_path: Path) -> None:
    """The driver of an elastic job is named, whatever its workers do or have done by then."""
    with job(hosts, tmp_path, "--min-np", "1", training=TRAINING[1:]) as running:
        wait_for("some steps", lambda: steps(tmp_path) > 3, limit_s=120)
        driver: psutil.Process = running.driver
        driver.suspend()
        try:
            wait_for("the job to stand still", lambda: stands_still(tmp_path))
            answer = asked(hosts, tmp_path)
        finally:
            driver.resume()
    first = answer["culprits"][0]
    assert (answer["kind"], first["host"]) == ("launcher", "h1"), answer["answer"]


@on_hosts
def test_a_worker_of_an_elastic_job(hosts: Hosts, tmp_path: Path) -> None:
    """Workers are found as fixed ranks are."""
    with job(hosts, tmp_path, "--min-np", "1", training=TRAINING[1:]):
        wait_for("some steps", lambda: steps(tmp_path) > 3, limit_s=120)
        hang(tmp_path, "lock", 2)
        answer = asked(hosts, tmp_path)
    first = answer["culprits"][0]
    assert (answer["kind"], first["host"], first["place"]) == ("lock", "h3", line_of("lock")), answer["answer"]


def static(hosts: Hosts, folder: Path, launcher: str = "gloo") -> list[str]:
    """Return the command that trains from h1 on all three hosts."""
    listed = ["-np", "3", "-H", "h1:1,h2:1,h3:1"]
    return hosts.typed("h1", folder, "horovodrun", f"--{launcher}", *listed, HVD_TRAIN, *TRAINING)

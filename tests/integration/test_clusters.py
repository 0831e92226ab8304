"""Every way to start on several hosts over ssh, and the errors where one of them is not ready."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hvd_train
from tests.support import hosts as cluster
from tests.support.documented import commands
from tests.support.elastic_hosts import ON_HOSTS, ROOT, SCRIPTS
from tests.support.hosts import Hosts
from tests.support.launching import PROGRAMS, finished, started, wait_for

pytestmark = ON_HOSTS

WAYS = {
    "horovodrun, Gloo": ["train_hostfile.sh", "hostfile", "--gloo"],
    "horovodrun, MPI": ["train_hostfile.sh", "hostfile", "--mpi"],
    "mpirun": ["train_mpirun.sh", "hostfile"],
}
ELASTIC = {"elastic": ["train_elastic.sh", "--hosts", "hostfile"]}
# Environments with hvd_train and Horovod for another MPI, `PATH:PATH`: packaging/build_horovod.py makes the latter.
OTHER_MPIS = [Path(folder) / "bin" for folder in os.environ.get("MPI_ENVIRONMENTS", "").split(":") if folder]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Run h1, h2 and h3; h4 is a name without a machine."""
    with cluster.hosts(tmp_path_factory.mktemp("hosts") / "cluster", 3, names=4) as found:
        yield found


def command(hosts: Hosts, folder: Path, way: str, listed: str, *arguments: str) -> list[str]:
    """Return the command that starts a training from h1 in one of the `WAYS`."""
    (folder / "hostfile").write_text(listed)
    script, *options = (WAYS | ELASTIC)[way]
    return hosts.typed("h1", folder, str(SCRIPTS / script), *options, "--", *arguments)


def nobody_left(hosts: Hosts) -> bool:
    """Return whether no host has a training process."""
    return not any(hosts.workers(name) for name in hosts.inits)


@pytest.mark.parametrize("way", WAYS)
def test_a_training_on_three_hosts(way: str, hosts: Hosts, tmp_path: Path) -> None:
    """Each host of the file gets a rank, in a run folder whose name has characters special to shells."""
    listed, count = "# three\nh1\nh2:1\n\nh3 slots=1 # the last\n", 3
    arguments = ["digits", "--epochs", "2", "--device", "cpu", "--output-dir", "a run; with $(signs)"]
    seen: set[str] = set()

    def all_at_work() -> bool:
        seen.update(name for name in hosts.inits if hosts.workers(name))
        return len(seen) == count

    with started(command(hosts, tmp_path, way, listed, *arguments), tmp_path, tmp_path / "output.txt") as launcher:
        wait_for("a worker on each host", all_at_work)
        code = launcher.wait(120)
    assert code == 0, (tmp_path / "output.txt").read_text()
    summary = json.loads((tmp_path / "a run; with $(signs)" / "summary.json").read_text())
    assert (summary["world_size"], summary["finished"]) == (count, True)
    wait_for("all workers to be gone", lambda: nobody_left(hosts), limit_s=10)


def test_blanks_in_the_paths(hosts: Hosts, tmp_path: Path) -> None:
    """With blanks in the paths of environment and folder, the ranks of all hosts start in that folder."""
    (tmp_path / "an environment").symlink_to(PROGRAMS.parent)
    folder = tmp_path / "my runs"
    folder.mkdir()
    horovodrun = [str(tmp_path / "an environment/bin/python"), "-m", "horovod.runner.launch", "--gloo"]
    code, output = finished(hosts.inside("h1", folder, *horovodrun, "-np", "2", "-H", "h1:1,h2:1", "pwd"), folder)
    assert code == 0, output
    assert [line.rpartition("<stdout>:")[2] for line in output.splitlines()] == [str(folder)] * 2


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_scaling_over_three_hosts(controller: str, hosts: Hosts, tmp_path: Path) -> None:
    """One worker runs on the first host and three on all; each is a row, and a fourth has no slot."""
    (tmp_path / "hostfile").write_text("h1 slots=1\nh2 slots=1\nh3 slots=1\n")
    line = f"bench scaling --hosts hostfile --controller {controller} digits --epochs 1 --device cpu --output-dir out"
    begin = hosts.typed("h1", tmp_path, str(PROGRAMS / "hvd-train"), *line.split(), "--np")
    code, output = finished([*begin, "1,3,4"], tmp_path)
    assert code == 2
    assert "4" in output and "hostfile" in output and not (tmp_path / "out").exists()
    code, output = finished([*begin, "1,3"], tmp_path)
    assert code == 0, output
    rows = json.loads((tmp_path / "out/scaling.json").read_text())["rows"]
    assert [(row["workers"], row["global_batch_size"], row["failed"]) for row in rows] == [
        (1, 64, None),
        (3, 192, None),
    ]
    summary = json.loads((tmp_path / "out/np-3/summary.json").read_text())
    assert summary["world_size"] == 3
    wait_for("all workers to be gone", lambda: nobody_left(hosts), limit_s=10)


@pytest.mark.skipif(not OTHER_MPIS, reason="MPI_ENVIRONMENTS names no environments with Horovod for other MPIs")
@pytest.mark.parametrize("programs", OTHER_MPIS, ids=lambda programs: programs.parent.name)
@pytest.mark.parametrize("listed", ["h1\nh2\n", "h1\nh2\nh3\n"], ids=["two", "three"])
def test_other_mpis(listed: str, programs: Path, hosts: Hosts, tmp_path: Path) -> None:
    """Plain mpirun of Open MPI 5, MPICH or a system's Open MPI starts a rank on each host, with a roll call."""
    arguments = ["digits", "--epochs", "1", "--device", "cpu", "--output-dir", "run"]
    begun = [
        word.replace(str(PROGRAMS), str(programs)) for word in command(hosts, tmp_path, "mpirun", listed, *arguments)
    ]
    code, output = finished(begun, tmp_path)
    assert code == 0, output
    assert json.loads((tmp_path / "run/summary.json").read_text())["world_size"] == len(listed.split())
    wait_for("all workers to be gone", lambda: nobody_left(hosts), limit_s=10)


def refused(hosts: Hosts, folder: Path, way: str, listed: str, words: str = "") -> str:
    """Return the output of a training that does not start.

    It ends within 45 s, without a traceback, and no process stays. That leaves three processes time to import torch on
    one core, and is before anything gives up waiting for the others (a minute). With `words`, these must come within
    that time, and the end may come later: Open MPI gives ranks time to commit.
    """
    log = folder / "output.txt"
    begun = time.monotonic()
    with started(command(hosts, folder, way, listed, "digits"), folder, log) as launcher:
        wait_for("an end", lambda: launcher.poll() is not None or (words and words in log.read_text()))
        took = time.monotonic() - begun
        code = launcher.wait(60)
    output = log.read_text()
    assert code != 0
    assert "Traceback" not in output
    assert took < 45, output
    wait_for("all workers to be gone", lambda: nobody_left(hosts), limit_s=10)
    return output


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["nowhere", "h4"])
def test_a_host_that_cannot_be_reached(way: str, name: str, hosts: Hosts, tmp_path: Path) -> None:
    """An unknown host name, or that of a machine that is off, is in the error."""
    output = refused(hosts, tmp_path, way, f"h1 slots=1\n{name} slots=1\n")
    if way == "mpirun":
        assert name in output
    else:
        assert f"train_hostfile.sh: {name} does not let us in by ssh without a password (ssh: " in output
        assert "take it out of hostfile" in output


def test_a_host_without_the_package(hosts: Hosts, tmp_path: Path) -> None:
    """A missing environment on a host is reported with its path before any rank starts."""
    done = hosts.inside("h3", tmp_path, "mount", "-t", "tmpfs", "none", str(PROGRAMS))
    subprocess.run(done, check=True)
    try:
        output = refused(hosts, tmp_path, "horovodrun, Gloo", "h1\nh2\nh3\n")
    finally:
        subprocess.run(hosts.inside("h3", tmp_path, "umount", str(PROGRAMS)), check=True)
    assert f"train_hostfile.sh: h3 has no {PROGRAMS}/hvd-train: set up the same environment there" in output


@pytest.fixture
def over(hosts: Hosts) -> Iterator[Callable[[Path, str], None]]:
    """Return a function that replaces a file on h3 only."""
    hidden: list[Path] = []

    def put(path: Path, text: str) -> None:
        other = hosts.folder / f"other-{path.name}"
        other.write_text(text)
        other.chmod(0o755)
        subprocess.run(hosts.inside("h3", ROOT, "mount", "--bind", str(other), str(path)), check=True)
        hidden.append(path)

    yield put
    for path in hidden:
        subprocess.run(hosts.inside("h3", ROOT, "umount", str(path)), check=True)


@pytest.mark.parametrize("way", ["horovodrun, Gloo", "mpirun"])
def test_a_host_with_another_version(way: str, over: Callable[[Path, str], None], hosts: Hosts, tmp_path: Path) -> None:
    """Different versions are reported with their hosts before the ranks meet."""
    path = Path(hvd_train.__file__).with_name("_version.py")
    over(path, path.read_text().replace(hvd_train.__version__, "0.0.1"))
    output = refused(hosts, tmp_path, way, "h1\nh2\nh3\n", "the ranks differ in hvd_train: ")
    assert "the ranks differ in hvd_train: " in output
    assert re.search(r"0\.0\.1 \(\w+\) on h3 \(rank 2\); set up the same on all", output), output


def test_another_version_in_an_elastic_job(over: Callable[[Path, str], None], hosts: Hosts, tmp_path: Path) -> None:
    """The first worker decides the job's version; a worker with another one is reported and the job ends."""
    path = Path(hvd_train.__file__).with_name("_version.py")
    over(path, path.read_text().replace(hvd_train.__version__, "0.0.1"))
    output = refused(hosts, tmp_path, "elastic", "h1\nh2\nh3\n", "differs from the job in hvd_train: ")
    assert re.search(r"h\d differs from the job in hvd_train: .* there, .* on h\d; set up the same on all", output)


def test_a_rank_that_never_arrives(over: Callable[[Path, str], None], hosts: Hosts, tmp_path: Path) -> None:
    """A rank that hangs in its imports is named with its host, and it ends with the others."""
    over(Path(hvd_train.__file__).with_name("run.py"), "import time; time.sleep(1000)")
    begun = command(hosts, tmp_path, "horovodrun, Gloo", "h1\nh2\nh3\n", "digits")
    begun[begun.index("env") + 1 : begun.index("env") + 1] = ["HVD_TRAIN_START_TIMEOUT_SECONDS=3"]
    code, output = finished(begun, tmp_path)
    assert code == 3, output
    assert "rank 2 on h3 did not come within 3 s" in output
    wait_for("all workers to be gone", lambda: nobody_left(hosts), limit_s=10)


ON_HOSTS_HERE = ("Is the cluster ready?", "Start", "Many trainings in one allocation", "Host files")


def documented() -> list[str]:
    """Return the commands of docs/clusters.md that are typed on hosts, with hosts and data of this test."""
    lines = [line for heading in ON_HOSTS_HERE for line in commands("clusters.md")[heading]]
    return [line.replace("node[01-04]:8", "h[1-2]:1").replace("/data/imagenet", "data") for line in lines]


def test_what_is_documented_is_run() -> None:
    """Commands under other headings are run by test_slurm and test_image; Apptainer cannot run here."""
    assert set(commands("clusters.md")) == {*ON_HOSTS_HERE, "Slurm", "Containers", "Apptainer"}


@pytest.mark.parametrize("line", documented())
def test_a_documented_command(line: str, hosts: Hosts, tmp_path: Path) -> None:
    """A command of docs/clusters.md, typed as printed from a checkout, does what the page says."""
    (tmp_path / "horovodrun_scripts").symlink_to(SCRIPTS)
    (tmp_path / "hostfiles").mkdir()
    (tmp_path / "hostfiles/two_hosts").write_text((ROOT / "hostfiles/two_hosts").read_text())
    (tmp_path / "hostfiles/elastic").write_text("# as many slots as there are cores here\nh1 slots=1\nh2 slots=1\n")
    (tmp_path / "data").mkdir()
    # Root may not call mpirun unasked, nor anybody start more ranks than there are cores.
    mpirun = ["OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMPI_MCA_rmaps_base_oversubscribe=1"]
    command = hosts.typed("h1", tmp_path, *mpirun, "bash", "-c", line)
    code, output = finished(command, tmp_path, limit_s=240)
    assert code == 0, output
    if "-- digits" in line:
        assert "done: top-1" in output
        assert "2 ranks" in output
    wait_for("all workers to be gone", lambda: nobody_left(hosts), limit_s=10)

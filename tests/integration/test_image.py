"""The container image: built from the Dockerfile, it trains as an ordinary
user and holds no compiler.

`make test-image` takes 15 minutes and 20 GB of disk for the first build. If podman cannot pull the
base image, root makes one with debootstrap. The build sees this machine's pip settings and
certificates. IMAGE may name an existing image, and IMAGE_COMPOSE a program like `docker compose`.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support import hosts as cluster
from tests.support.launching import PROJECT, commands, started, wait_for, write_program


def answers(engine: str) -> bool:
    """Return whether an engine works: docker may be a client alone."""
    return (
        shutil.which(engine) is not None
        and not subprocess.run([engine, "info"], capture_output=True).returncode
    )


ENGINE = next(filter(answers, ("docker", "podman")), "")
IS_PODMAN = ENGINE == "podman"
COMPOSE_PROGRAM = os.environ.get("IMAGE_COMPOSE", "" if IS_PODMAN else "docker compose").split()
# some kernels let it raise no limit
PODMAN_OPTIONS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096")
# the last cannot run here
BUILD, ON_HOSTS, COMPOSE, KUBERNETES = commands("clusters.md")["Containers"]

pytestmark = [
    pytest.mark.image,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not ENGINE, reason="neither docker nor podman works on this machine"),
]


def engine(*arguments: str | Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    command = [ENGINE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)


def obtain_base(folder: Path) -> None:
    """Pull the base image, or, with podman as root, make it from Debian's packages."""
    (base,) = re.findall(
        r"^ARG BASE=(\S+)$", (PROJECT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    if engine("image", "inspect", base).returncode == 0 or engine("pull", base).returncode == 0:
        return
    if not IS_PODMAN or os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip(
            f"{base} cannot be pulled here, and only root with podman and debootstrap can make one"
        )
    root = folder / "base"
    tar = folder / "base.tar"
    suite = base.rpartition(":")[2].removesuffix("-slim")
    make = ["debootstrap", "--variant=minbase", "--include=ca-certificates", suite, root]
    subprocess.run(make, check=True, capture_output=True, timeout=900)
    subprocess.run(
        ["tar", "-C", root, "-cf", tar, "."], check=True, capture_output=True, timeout=300
    )
    assert engine("import", tar, f"localhost/{base}").returncode == 0
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the name of the image, which IMAGE gives or which is built now
    by the documented command.
    """
    if named := os.environ.get("IMAGE"):
        assert engine("tag", named, "hvd_train").returncode == 0
        return named
    folder = tmp_path_factory.mktemp("image")
    obtain_base(folder)
    built = subprocess.run(
        typed(BUILD, docker(folder)), capture_output=True, text=True, check=False, timeout=3000
    )
    assert built.returncode == 0, (built.stdout + built.stderr)[-6000:]
    return "hvd_train"


def docker(folder: Path, *options: str) -> Path:
    """Write a program `docker` that calls the engine with these options."""
    build = (
        ["--pull=never", "--network=host", "--isolation=chroot", "--format=docker"]
        if IS_PODMAN
        else []
    )
    for path in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf") if IS_PODMAN else ():
        build += [f"--volume={path}:{path}:ro"] if Path(path).exists() else []
    compose = " ".join(COMPOSE_PROGRAM)
    building = " ".join(build)
    other = " ".join(options)
    cases = (
        f'compose) shift; exec {compose} "$@" ;; build) shift; exec {ENGINE} '
        f'build {building} "$@" ;;'
    )
    return write_program(
        folder, "docker", f'case $1 in {cases} *) exec {ENGINE} {other} "$@" ;; esac'
    )


def typed(line: str, program: Path) -> list[str]:
    """Return the command that runs a documented line in a checkout."""
    return [
        "env",
        "-C",
        str(PROJECT),
        f"PATH={program.parent}:{os.environ['PATH']}",
        "sh",
        "-c",
        f"exec {line}",
    ]


def run(
    image: str, *arguments: str, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    podman = (*PODMAN_OPTIONS, "--network=none") if IS_PODMAN else ()
    return engine("run", "--rm", *options, *podman, image, *arguments, timeout_s=900)


def finished(image: str, *arguments: str, options: Sequence[str] = ()) -> str:
    result = run(image, *arguments, options=options)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return result.stdout


def test_trains_the_digits_as_an_ordinary_user(image: str, tmp_path: Path) -> None:
    """With one rank per GPU, or two, a read-only root and no capability; the files
    on the host are not root's.
    """
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    rights = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    rights += ["--read-only-tmpfs=false"] if IS_PODMAN else []  # docker has none
    options = [*rights, f"--volume={runs}:/home/trainer/runs"]
    top1 = re.search(r"done: top-1 ([\d.]+)%.* on (\d+) ranks?", finished(image, options=options))
    assert top1
    assert float(top1[1]) >= 98
    assert int(top1[2]) == min(2, len(os.sched_getaffinity(0)))
    (summary,) = runs.glob("*/summary.json")
    assert json.loads(summary.read_text())["finished"]
    assert os.geteuid() != 0 or summary.stat().st_uid != 0


def test_holds_no_compiler_and_no_secret(image: str) -> None:
    """It runs as a user by number, without settings of the build machine; a bill of
    materials names its packages.
    """
    names = " -o ".join(
        f"-name '{name}'" for name in ("nvcc", "cicc", "cc1plus", "id_*", "ssh_host_*", "*.whl")
    )
    programs = "for name in gcc g++ c++ cc make cmake nvcc; do type -P $name; done"
    files = rf"find / -xdev -type f \( {names} -o -path /etc/pip.conf -size +0 \) 2>/dev/null"
    assert finished(image, "bash", "-c", f"{programs}; {files}; true").split() == []
    bill = json.loads(finished(image, "cat", "/opt/hvd_train/sbom.cdx.json"))
    assert {"torch", "horovod", "pillow", "hvd_train"} <= {
        component["name"] for component in bill["components"]
    }
    assert finished(image, "stat", "-c", "%a %U", "/var/lib/hvd_train") == "700 trainer\n"
    settings = json.loads(engine("image", "inspect", image).stdout)[0]["Config"]
    assert re.fullmatch(r"[1-9]\d*(:\d+)?", settings["User"])


@dataclass
class Cluster:
    """Containers of the image in a network of their own, which share keys and runs."""

    image: str
    folder: Path
    name: str = field(default_factory=lambda: f"hvd-train-test-{uuid4().hex[:8]}")

    def start(self, host: str, *arguments: str) -> None:
        options = [f"--name={self.name}-{host}", f"--hostname={host}", f"--network-alias={host}"]
        options += [f"--network={self.name}", *(PODMAN_OPTIONS if IS_PODMAN else ())]
        options += [f"--volume={self.folder}/keys:/etc/hvd_train/ssh:ro"]
        options += [f"--volume={self.folder}/runs:/home/trainer/runs"]
        assert engine("run", "--detach", *options, self.image, *arguments).returncode == 0

    def inside(self, host: str, *command: str) -> subprocess.CompletedProcess[str]:
        return engine("exec", f"{self.name}-{host}", *command)

    def remove(self, host: str) -> None:
        engine("rm", "-f", "-t", "1", f"{self.name}-{host}")

    def waits_for(self, text: str) -> str:
        """Wait until the launcher's container has printed a text; return all output."""

        def output() -> str:
            logs = engine("logs", f"{self.name}-train")
            return logs.stdout + logs.stderr

        wait_for(text, lambda: text in output(), limit_s=600)
        return output()


@pytest.fixture
def two(image: str, tmp_path: Path) -> Iterator[Cluster]:
    """Run hosts h1 and h2 with a pair of keys that the image has made."""
    for name in ("keys", "runs"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
    both = Cluster(image, tmp_path)
    finished(image, "keys", options=(f"--volume={tmp_path}/keys:/etc/hvd_train/ssh",))
    assert engine("network", "create", both.name).returncode == 0
    try:
        for host in ("h1", "h2"):
            both.start(host, "host")
        for host in ("h1", "h2"):
            wait_for(host, lambda host=host: both.inside("h1", "ssh", host, "true").returncode == 0)
        yield both
    finally:
        for host in ("h1", "h2", "train"):
            both.remove(host)
        engine("network", "rm", both.name)


def test_two_containers_are_two_hosts(two: Cluster) -> None:
    """If one is killed, the training continues without a lost step and
    takes in the new container.
    """
    listed = "/opt/hvd_train/hostfiles/two_hosts"
    for way in ("--gloo", "--mpi"):
        two.start("train", "train_hostfile.sh", listed, way, "--", "digits", "--epochs", "3")
        assert "on 2 ranks" in two.waits_for("next:  hvd-train report")
        two.remove("train")
    two.start("train", "train_elastic.sh", "--hosts", listed, "--", "digits", "--epochs", "5000")
    two.waits_for("epoch    2/5000")
    two.remove("h2")
    two.waits_for("world 2 -> 1")
    two.start("h2", "host")
    output = two.waits_for("world 1 -> 2")
    assert output.count("0 steps lost") == output.count("steps lost") >= 2
    assert engine("kill", "--signal", "TERM", f"{two.name}-train").returncode == 0
    assert engine("wait", f"{two.name}-train").stdout.strip() == "143"


def test_no_user_gets_in_without_the_key(two: Cluster) -> None:
    """A host refuses passwords, other keys and other users; without a key it does not start."""
    attacker = (
        "ssh-keygen -q -t ed25519 -N '' -f /tmp/other; ssh -v -F /dev/null -i /tmp/other -p 2222"
    )
    attacker += " -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null h2 true"
    refused = two.inside("h1", "sh", "-c", attacker)
    assert refused.returncode == 255
    assert set(re.findall(r"can continue: (\S+)", refused.stderr)) == {"publickey"}
    assert two.inside("h1", "ssh", "-l", "root", "h2", "true").returncode == 255
    without = run(two.image, "host")
    assert without.returncode == 2
    assert "there is no key in /etc/hvd_train/ssh; mount" in without.stderr


@pytest.mark.skipif(
    "IMAGE" in os.environ, reason="IMAGE names one that is there: nothing is to be built"
)
def test_the_documented_cluster_on_one_machine(image: str, tmp_path: Path) -> None:
    """`docker compose up --build` as printed trains on two hosts, and Ctrl-C ends it."""
    if not COMPOSE_PROGRAM or subprocess.run([*COMPOSE_PROGRAM, "version"], check=False).returncode:
        pytest.skip("there is no docker compose, and IMAGE_COMPOSE names no other program")
    program = docker(tmp_path)
    output = tmp_path / "output.txt"
    try:
        with started(typed(COMPOSE, program), PROJECT, output) as compose:
            wait_for("the end", lambda: "on 2 ranks" in output.read_text(), limit_s=600)
            compose.send_signal(signal.SIGINT)
            compose.wait(200)
    finally:
        subprocess.run(
            typed("docker compose down --volumes", program),
            check=False,
            capture_output=True,
            timeout=120,
        )


@pytest.mark.skipif(bool(cluster.NO_HOSTS), reason=cluster.NO_HOSTS or "-")
def test_the_documented_training_on_hosts(image: str, tmp_path: Path) -> None:
    """`train_docker.sh` as printed runs a container on each host of the list and leaves none."""
    if not IS_PODMAN:
        pytest.skip("one docker daemon cannot be two hosts")
    storage = engine("info", "--format", "{{.Store.GraphRoot}}").stdout.strip()
    # A storage of its own for each host, over the images that are there.
    own = ("--root", f"{tmp_path}/$(uname -n)", "--runroot", "/run/containers")
    program = docker(tmp_path, *own, "--storage-opt", f"additionalimagestore={storage}")
    for name in ("horovodrun_scripts", "hostfiles", "hvd_train"):
        (tmp_path / name).symlink_to(PROJECT / name)
    environment = [
        f"PATH={cluster.PATH}",
        f"CONTAINER_ENGINE={program}",
        f"CONTAINER_FLAGS={' '.join(PODMAN_OPTIONS)}",
    ]
    with cluster.hosts(tmp_path / "cluster", 2, names=2) as hosts:
        command = hosts.inside("h1", tmp_path, "env", *environment, *shlex.split(ON_HOSTS))
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert "done: top-1" in done.stdout
        assert "on 2 ranks" in done.stdout
        for host in ("h1", "h2"):
            left = hosts.inside(host, tmp_path, str(program), "ps", "--all", "--quiet")
            assert (
                subprocess.run(left, capture_output=True, text=True, check=True, timeout=200).stdout
                == ""
            )

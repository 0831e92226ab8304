"""The container image: built from the Dockerfile, it trains as an ordinary user and holds no compiler.

`make test-image` takes 15 minutes and 20 GB of disk for the first build. If podman cannot pull the base image, it gets
one made by debootstrap, as root. What this machine needs for its package index (pip's settings, certificates) is
mounted for the build. Environment: IMAGE_ENGINE, IMAGE_BUILD_OPTIONS, IMAGE_RUN_OPTIONS, and IMAGE to test an image
that exists. Where crun refuses the machine's control groups: IMAGE_ENGINE="podman --runtime runc".
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import hosts as cluster_hosts
from tests.support.documented import commands
from tests.support.launching import PROGRAMS, started, wait_for

PROJECT = Path(__file__).resolve().parents[2]
DOCKERFILE = PROJECT / "Dockerfile"
PODMAN_OPTIONS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096")  # some kernels let it raise no limit
OWN_SETTINGS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf")  # where they are, the build sees them


def available() -> str | None:
    """Return the engine of this machine, or None; a `docker` without its daemon is none."""
    with suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=20).returncode == 0:
            return "docker"
    return shutil.which("podman") and "podman"


ENGINE = os.environ.get("IMAGE_ENGINE") or available()
pytestmark = [
    pytest.mark.image,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(ENGINE is None, reason="neither docker, with its daemon, nor podman is on this machine"),
]


def engine(*arguments: str | Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Run docker or podman, and return what came of it."""
    assert ENGINE
    command = [*shlex.split(ENGINE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)


def is_podman() -> bool:
    return "podman" in engine("--version").stdout


def base_image() -> str:
    """Return the default base image of the Dockerfile."""
    match = re.search(r"^ARG BASE=(\S+)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert match
    return match.group(1)


def obtain_base(folder: Path) -> None:
    """Pull the base image, or, with podman as root, make it from Debian's packages."""
    base = base_image()
    if engine("image", "inspect", base).returncode == 0 or engine("pull", base).returncode == 0:
        return
    if not is_podman() or os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip(f"{base} cannot be pulled here, and only root with podman and debootstrap can make one")
    suite = base.rpartition(":")[2].removesuffix("-slim")
    make = ["debootstrap", "--variant=minbase", "--include=ca-certificates", suite, str(folder / "base")]
    subprocess.run(make, check=True, capture_output=True, timeout=900)
    tar = ["tar", "-C", str(folder / "base"), "-cf", str(folder / "base.tar"), "."]
    subprocess.run(tar, check=True, capture_output=True, timeout=300)
    assert engine("import", folder / "base.tar", f"localhost/{base}").returncode == 0
    shutil.rmtree(folder / "base")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the name of the image, which IMAGE gives or which is built now."""
    if named := os.environ.get("IMAGE"):
        return named
    folder = tmp_path_factory.mktemp("image")
    obtain_base(folder)
    name = "hvd_train:test"
    built = engine("build", *build_options(), "-t", name, PROJECT, timeout_s=3000)
    assert built.returncode == 0, (built.stdout + built.stderr)[-6000:]
    return name


def build_options() -> list[str]:
    """Return the options that a build needs on this machine."""
    options = shlex.split(os.environ.get("IMAGE_BUILD_OPTIONS", ""))
    if is_podman():
        options += ["--pull=never", "--network=host", "--isolation=chroot", "--format=docker"]
        options += [f"--volume={path}:{path}:ro" for path in OWN_SETTINGS if Path(path).exists()]
    return options


def run(image: str, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the image to its end and remove the container."""
    options = (*options, *shlex.split(os.environ.get("IMAGE_RUN_OPTIONS", "")))
    if is_podman() and not os.environ.get("IMAGE_RUN_OPTIONS"):
        options += (*PODMAN_OPTIONS, "--network=none")
    return engine("run", "--rm", *options, image, *arguments, timeout_s=900)


def test_trains_the_digits_without_a_word_more(image: str) -> None:
    """`docker run IMAGE` trains the digits on as many ranks as there are GPUs or 2, to at least 98%."""
    result = run(image)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    top1 = re.search(r"done: top-1 ([\d.]+)%.* on (\d+) ranks?", result.stdout)
    assert top1, result.stdout[-4000:]
    assert float(top1[1]) >= 98
    assert int(top1[2]) == min(2, len(os.sched_getaffinity(0)))


def test_trains_as_an_ordinary_user_into_a_mounted_folder(image: str, tmp_path: Path) -> None:
    """`docker run -v ... IMAGE train digits --epochs 3` leaves the run's files on the host, not as root."""
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    result = run(image, "train", "digits", "--epochs", "3", options=(f"--volume={runs}:/home/trainer/runs",))
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    summaries = list(runs.glob("*/summary.json"))
    assert len(summaries) == 1
    assert json.loads(summaries[0].read_text(encoding="utf-8"))["epochs"] == 3
    if os.geteuid() == 0:
        assert summaries[0].stat().st_uid != 0


def test_trains_with_nothing_to_write_on_and_no_right(image: str) -> None:
    """The image trains on a read-only root file system without any capability."""
    options = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
    if is_podman():
        options += ("--read-only-tmpfs=false",)  # docker has none
    result = run(image, "train", "digits", "--epochs", "2", options=options)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert "done: top-1" in result.stdout


def test_the_doctor_finds_every_controller(image: str) -> None:
    """`docker run IMAGE doctor` says that nothing is broken, over Gloo and over MPI."""
    result = run(image, "doctor", "--json")
    findings = {found["name"]: found for found in json.loads(result.stdout)["findings"]}
    assert result.returncode == 0
    assert [found for found in findings.values() if found["verdict"] == "broken"] == []
    allreduces = [name for name in findings if name.startswith(("horovodrun -", "mpirun"))]
    assert {"horovodrun --gloo", "horovodrun --mpi"} <= set(allreduces), sorted(findings)
    assert {findings[name]["verdict"] for name in allreduces} == {"ok"}


def test_ranks_start_over_mpi(image: str) -> None:
    """Programs of the image can be run directly: train_local.sh with --mpi trains on 2 ranks."""
    result = run(image, "train_local.sh", "-n", "2", "--mpi", "--", "digits", "--epochs", "1")
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]


def test_a_word_that_is_no_command_is_one_line(image: str) -> None:
    """The error about a mistyped command names the nearest one, with exit code 2 and no traceback."""
    result = run(image, "trian")
    assert result.returncode == 2
    assert "train" in result.stderr
    assert "Traceback" not in result.stderr


def test_arguments_arrive_as_typed(image: str) -> None:
    """Blanks, quotes, `;` and `$()` pass through the entry point unchanged."""
    words = ["a b", "", "it's", 'q"q', "; touch pwned", "$(touch pwned)", "*"]
    result = run(image, "train_local.sh", "--dry-run", "--", *words)
    assert shlex.split(result.stdout)[-len(words) :] == words


def test_holds_no_compiler_and_no_secret(image: str) -> None:
    """The image has no compilers (g++, make, nvcc), no keys and no settings of the build machine."""
    names = " -o ".join(f"-name '{name}'" for name in ("nvcc", "cicc", "cc1plus", "id_*", "ssh_host_*", "*.whl"))
    programs = "for name in gcc g++ c++ cc make cmake nvcc; do type -P $name; done"
    files = rf"find / -xdev -type f \( {names} -o -path /etc/pip.conf -size +0 \) 2>/dev/null"
    result = run(image, "bash", "-c", f"{programs}; {files}; true")
    assert (result.returncode, result.stdout.split()) == (0, [])


def test_says_what_is_in_it(image: str) -> None:
    """The image holds a bill of materials that names its Python packages, and not the tool that has written it."""
    bill = json.loads(run(image, "cat", "/opt/hvd_train/sbom.cdx.json").stdout)
    assert bill["bomFormat"] == "CycloneDX"
    packages = {component["name"] for component in bill["components"]}
    assert {"torch", "horovod", "pillow", "hvd_train"} <= packages
    assert "cyclonedx-bom" not in packages


def test_the_folder_of_its_key_is_its_users_alone(image: str) -> None:
    """What ssh reads there can be written by nobody else."""
    result = run(image, "stat", "-c", "%a %U", "/var/lib/hvd_train")
    assert result.stdout == "700 trainer\n"


def test_metadata(image: str) -> None:
    """The image runs as a user by number, has one entry point, labels, and a health check that succeeds."""
    config = json.loads(engine("image", "inspect", image).stdout)[0]
    settings = config["Config"]
    assert re.fullmatch(r"[1-9]\d*(:\d+)?", settings["User"])
    assert settings["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    health = settings.get("Healthcheck") or config.get("Healthcheck") or config["HealthCheck"]
    kind, *command = health["Test"]
    assert kind == "CMD"
    assert run(image, *command).returncode == 0
    print(f"\n{image}: {config['Size'] / 1e9:.2f} GB", file=sys.stderr)


@dataclass(frozen=True)
class Cluster:
    """Containers of the image in a network of their own, which share keys and runs."""

    image: str
    name: str
    keys: Path
    runs: Path

    def options(self, host: str) -> list[str]:
        """Return the options that start a container of this cluster."""
        limits = PODMAN_OPTIONS if is_podman() else ()
        mounts = [f"--volume={self.keys}:/etc/hvd_train/ssh:ro", f"--volume={self.runs}:/home/trainer/runs"]
        return [f"--name={self.name}-{host}", f"--hostname={host}", f"--network-alias={host}",
                f"--network={self.name}", *limits, *mounts]  # fmt: skip

    def start(self, host: str, *arguments: str) -> None:
        """Start a container in the background."""
        started = engine("run", "--detach", *self.options(host), self.image, *arguments)
        assert started.returncode == 0, started.stderr

    def inside(self, host: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container."""
        return engine("exec", f"{self.name}-{host}", *command)

    def remove(self, host: str) -> None:
        """Kill and remove a container."""
        engine("rm", "-f", "-t", "1", f"{self.name}-{host}")

    def output(self, host: str) -> str:
        """Return everything that a container has printed."""
        logs = engine("logs", f"{self.name}-{host}")
        return logs.stdout + logs.stderr

    def wait_for(self, words: str) -> None:
        """Wait until the launcher's container has printed these words."""
        try:
            wait_for(words, lambda: words in self.output("train"), limit_s=180)
        except AssertionError:
            pytest.fail(f"no {words!r} in:\n{self.output('train')[-4000:]}")


@pytest.fixture
def two(image: str, tmp_path: Path) -> Iterator[Cluster]:
    """Run hosts h1 and h2 with a pair of keys that the image has made."""
    cluster = Cluster(image, f"hvd-train-test-{os.getpid()}", tmp_path / "keys", tmp_path / "runs")
    for folder in (cluster.keys, cluster.runs):
        folder.mkdir()
        folder.chmod(0o777)
    made = run(image, "keys", options=(f"--volume={cluster.keys}:/etc/hvd_train/ssh",))
    assert made.returncode == 0, made.stderr
    assert engine("network", "create", cluster.name).returncode == 0
    try:
        for host in ("h1", "h2"):
            cluster.start(host, "host")
        wait_for("both hosts", lambda: all(reached(cluster, "h1", host) for host in ("h1", "h2")))
        yield cluster
    finally:
        for host in ("h1", "h2", "train"):
            cluster.remove(host)
        engine("network", "rm", cluster.name)


def reached(cluster: Cluster, one: str, other: str) -> bool:
    return cluster.inside(one, "ssh", other, "true").returncode == 0


@pytest.mark.parametrize("way", ["--gloo", "--mpi"])
def test_two_containers_are_two_hosts(way: str, two: Cluster) -> None:
    """horovodrun starts a rank in each of two containers over ssh."""
    two.start("train", "train_hostfile.sh", "/opt/hvd_train/hostfiles/two_hosts", way, "--", "digits", "--epochs", "3")
    two.wait_for("next:  hvd-train evaluate")
    assert "on 2 ranks" in two.output("train")


def test_a_container_is_killed_and_comes_back(two: Cluster) -> None:
    """After a container is killed, the training goes on without a lost step and takes in the new one."""
    hosts, train = "/opt/hvd_train/hostfiles/two_hosts", ["digits", "--epochs", "5000", "--output-dir", "runs/one"]
    two.start("train", "train_elastic.sh", "--hosts", hosts, "--", *train)
    two.wait_for("epoch    2/5000")
    two.remove("h2")
    two.wait_for("world 2 -> 1")
    two.start("h2", "host")
    two.wait_for("world 1 -> 2")
    assert two.output("train").count("0 steps lost") == 2
    assert engine("kill", "--signal", "TERM", f"{two.name}-train").returncode == 0
    assert engine("wait", f"{two.name}-train").stdout.strip() == "143"


def test_nobody_gets_in_without_the_key(two: Cluster) -> None:
    """A host refuses passwords, other keys and other users."""
    stranger = "ssh-keygen -q -t ed25519 -N '' -f /tmp/other; ssh -v -F /dev/null -i /tmp/other -p 2222"
    stranger += " -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null h2 true"
    refused = two.inside("h1", "sh", "-c", stranger)
    assert refused.returncode == 255
    offered = {line.rpartition(": ")[2].strip() for line in refused.stderr.splitlines() if "can continue: " in line}
    assert offered == {"publickey"}
    assert two.inside("h1", "ssh", "-l", "root", "h2", "true").returncode == 255
    tunnel = two.inside("h1", "ssh", "-o", "ExitOnForwardFailure=yes", "-R", "12345:localhost:1", "h2", "true")
    assert tunnel.returncode == 255


def test_a_host_without_a_key(image: str) -> None:
    """A host without a key prints one line with what to type and starts no server."""
    result = run(image, "host")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(
        "hvd_train image: host: there is no key in /etc/hvd_train/ssh; mount"
    )
    look = "cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == \"0A\"'; pgrep sshd; true"
    assert run(image, "bash", "-c", look).stdout == ""


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not on this machine")
def test_hadolint_has_nothing_to_say() -> None:
    """hadolint has no complaint about the Dockerfile."""
    linted = subprocess.run(["hadolint", DOCKERFILE], capture_output=True, text=True, check=False, timeout=60)
    assert linted.returncode == 0, linted.stdout


def test_compose(image: str, tmp_path: Path) -> None:
    """`docker compose up` trains on two hosts on one machine."""
    if (compose := compose_program()) is None:
        pytest.skip("neither docker compose nor podman-compose is on this machine")
    assert engine("tag", image, "hvd_train").returncode == 0
    environment = {**os.environ, "EPOCHS": "3"}

    def composed(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*compose, "-f", str(PROJECT / "compose.yaml"), "-p", f"test{os.getpid()}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=400, env=environment)

    try:
        up = composed("up", "--detach", "--no-build")
        assert up.returncode == 0, up.stdout + up.stderr
        wait_for("the end", lambda: "on 2 ranks" in composed("logs", "train").stdout, limit_s=180)
    finally:
        composed("down", "--volumes")


BUILD, ON_HOSTS, COMPOSE, KUBERNETES = commands("clusters.md")["Containers"]  # the last cannot run here


def docker(folder: Path, *options: str) -> Path:
    """Write a program `docker` for the commands of docs/clusters.md, which calls the engine with these options."""
    assert ENGINE
    program = folder / "docker"
    program.write_text(
        "#!/bin/sh\ncase $1 in\n"
        f'  compose) shift; exec {shlex.join(compose_program() or ["false"])} "$@" ;;\n'
        f'  build) shift; exec {ENGINE} build {shlex.join(build_options())} "$@" ;;\n'
        f'  *) exec {ENGINE} {" ".join(options)} "$@" ;;\nesac\n'
    )
    program.chmod(0o755)
    return program


def typed(line: str, program: Path) -> list[str]:
    """Return the command that runs a documented line in a checkout."""
    return ["env", "-C", str(PROJECT), f"PATH={program.parent}:{os.environ['PATH']}", "sh", "-c", f"exec {line}"]


@pytest.mark.skipif("IMAGE" in os.environ, reason="IMAGE names one that is there: nothing is to be built")
def test_the_documented_build(image: str, tmp_path: Path) -> None:
    """`docker build` as printed, from a checkout, names the image that the other commands use."""
    built = subprocess.run(typed(BUILD, docker(tmp_path)), capture_output=True, text=True, check=False, timeout=3000)
    assert built.returncode == 0, (built.stdout + built.stderr)[-4000:]
    ids = {engine("image", "inspect", "--format", "{{.Id}}", name).stdout for name in (image, "hvd_train")}
    assert len(ids) == 1


@pytest.mark.skipif("IMAGE" in os.environ, reason="IMAGE names one that is there: nothing is to be built")
def test_the_documented_cluster_on_one_machine(image: str, tmp_path: Path) -> None:
    """`docker compose up --build` as printed trains on two hosts, and Ctrl-C ends it."""
    if compose_program() is None:
        pytest.skip("neither docker compose nor podman-compose is on this machine")
    program, output = docker(tmp_path), tmp_path / "output.txt"
    try:
        with started(typed(COMPOSE, program), PROJECT, output) as compose:
            wait_for("the end", lambda: "on 2 ranks" in output.read_text(), limit_s=300)
            compose.send_signal(signal.SIGINT)
            compose.wait(60)
    finally:
        subprocess.run(typed("docker compose down --volumes", program), check=False, capture_output=True, timeout=120)


@pytest.mark.skipif(bool(cluster_hosts.missing()), reason=cluster_hosts.missing() or "-")
def test_the_documented_training_on_hosts(image: str, tmp_path: Path) -> None:
    """`train_docker.sh` as printed runs a container on each host of the list and leaves none."""
    if not is_podman():
        pytest.skip("one docker daemon cannot be two hosts")
    assert engine("tag", image, "hvd_train").returncode == 0
    storage = engine("info", "--format", "{{.Store.GraphRoot}}").stdout.strip()
    # A storage of its own for each host, over the images that are there.
    own = ("--root", f"{tmp_path}/$(uname -n)", "--runroot", "/run/containers")
    program = docker(tmp_path, *own, "--storage-opt", f"additionalimagestore={storage}")
    for name in ("horovodrun_scripts", "hostfiles"):
        (tmp_path / name).symlink_to(PROJECT / name)
    environment = [f"PATH={PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin", f"CONTAINER_ENGINE={program}"]
    environment.append(f"CONTAINER_FLAGS={' '.join(PODMAN_OPTIONS)}")
    with cluster_hosts.hosts(tmp_path / "cluster", 2, names=2) as hosts:
        command = hosts.inside("h1", tmp_path, "env", *environment, *shlex.split(ON_HOSTS))
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert "done: top-1" in done.stdout
        assert "on 2 ranks" in done.stdout
        for host in ("h1", "h2"):
            left = hosts.inside(host, tmp_path, str(program), "ps", "--all", "--quiet")
            assert subprocess.run(left, capture_output=True, text=True, check=True, timeout=60).stdout == ""


def compose_program() -> list[str] | None:
    if named := os.environ.get("IMAGE_COMPOSE"):
        return shlex.split(named)
    if ENGINE == "docker" and engine("compose", "version").returncode == 0:
        return ["docker", "compose"]
    return None

"""Containers by docker, and ssh in the image."""

import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.launching import AWKWARD, PROJECT, PYTHON, run, write_program

pytestmark = pytest.mark.integration
OTHER = [f"other {verb}" for verb in ("create", "cp", "start", "exec")]
HERE = [f"here {verb}" for verb in ("create", "cp", "start")]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose docker and ssh only write down their arguments; list two hosts.

    `calls` reads them.
    """
    (tmp_path / "hosts").write_text("localhost slots=1\nother slots=2\n")
    folder = tmp_path / "bin"
    log = tmp_path / "docker.log"
    # As ssh does: join the words, and let a shell split them.
    known = '[ "$1" != -G ] || { echo proxyjump elsewhere; exit; }; '
    write_program(
        folder,
        "ssh",
        known + 'while [ "$1" != -- ]; do shift; done; shift; export ON=$1; shift; exec sh -c "$*"',
    )
    # One write per line: two containers may be removed at once, and print() may write the end of a
    # line separately.
    words = "[os.getenv('ON', 'here'), *sys.argv[1:]]"
    dump = f"import json, os, sys; os.write(1, (json.dumps({words}) + chr(10)).encode())"
    write_program(
        folder,
        "docker",
        f'[ "$1" != cp ] || cat > {tmp_path}/cp.tar; exec {PYTHON} -c "{dump}" "$@" >> {log}',
    )
    write_program(folder, "nvidia-smi", "exit 9")
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def calls() -> tuple[list[list[str]], list[str]]:
    """Return host and arguments of each call of docker, and host and command together."""
    found = [json.loads(line) for line in Path("docker.log").read_text().splitlines()]
    return found, [" ".join(call[:2]) for call in found]


def test_docker(environment: dict[str, str], tmp_path: Path) -> None:
    """A container runs on each host, with the key in a file and the arguments as typed,
    and is removed at the end.
    """
    options = ["--volume", "/data:/data:ro", "--runs", "my runs", "--env", "WANTED"]
    environment["WANTED"] = "hunter2"
    result = run("train_docker.sh", "hosts", *options, "--", *AWKWARD, cwd=tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    found, verbs = calls()
    assert verbs[:4] == OTHER
    assert verbs[4:7] == HERE
    assert sorted(verbs[7:]) == ["here rm", "other rm"]
    assert found[0][-2:] == ["hvd_train", "host"]
    launcher = found[4]
    assert launcher[-len(AWKWARD) :] == AWKWARD
    line = " ".join(launcher)
    assert "hvd-train launch --hosts /etc/hvd_train/ssh/hostfile --env WANTED --" in line
    # of docker, and of the launcher in the container
    assert re.findall(r"--env (\S+)", line)[1:] == ["WANTED", "WANTED"]
    assert "WANTED" not in found[0]
    assert "hunter2" not in str(found)
    assert f"{tmp_path}/my runs:/home/trainer/runs" in launcher
    assert (tmp_path / "my runs").stat().st_mode & 0o022 == 0, "others can write there"
    copied = subprocess.check_output(["tar", "tvf", "cp.tar"], text=True)
    assert re.search(r"-rw------- 1000/1000 .* \./id_ed25519\n", copied)
    assert "PRIVATE KEY" not in result.stdout + result.stderr


def test_docker_dry_run(environment: dict[str, str], tmp_path: Path) -> None:
    """Every command is printed, and none is run; typed, they do what the launcher does."""
    result = run("train_docker.sh", "hosts", "--dry-run", "--elastic", cwd=tmp_path, **environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert not (tmp_path / "docker.log").exists()
    assert "launch --hosts /etc/hvd_train/ssh/hostfile --elastic --" in result.stdout
    typed = ["bash", "-ec", result.stdout]
    subprocess.run(typed, env={**os.environ, **environment}, check=True, timeout=150)
    _, verbs = calls()
    assert verbs == [*OTHER, *HERE, "here rm", "other rm"]


def test_ssh_in_the_image_reads_nothing_that_others_could_write() -> None:
    """In Apptainer, folders for temporary files belong to the machine: no
    file of ssh may be there.
    """
    packaging = PROJECT / "packaging"
    names = ("ssh_config", "sshd_config", "entrypoint.sh")
    text = "\n".join((packaging / f"image_{name}").read_text() for name in names)
    paths = re.findall(r"(?<![\w$}])/[\w./-]+", re.sub(r"(?m)^\s*#.*", "", text))
    assert "/var/lib/hvd_train/ssh/config" in paths
    shared = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/home")
    assert not [path for path in paths if path.startswith(shared)]
    assert (
        "install -d -m 700 -o trainer -g trainer /var/lib/hvd_train\n"
        in (PROJECT / "Dockerfile").read_text()
    )


def test_the_key_of_a_container_is_its_users_alone(tmp_path: Path) -> None:
    """ssh reads it in a folder of mode 0700; if that is not writable, one line says what to do."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    shared = tmp_path / "shared"
    own = tmp_path / "own"
    entrypoint = tmp_path / "entrypoint.sh"
    text = (PROJECT / "packaging" / "image_entrypoint.sh").read_text()
    text = text.replace("/etc/hvd_train/ssh", str(shared)).replace("/var/lib/hvd_train", str(own))
    entrypoint.write_text(text)
    shared.mkdir()
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", shared / "id_x"], check=True
    )
    own.write_text("")
    done = subprocess.run(
        ["bash", entrypoint, "echo", "started"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("hvd_train image: user ")
    assert done.stderr.endswith("or mount a folder there\n")
    own.unlink()
    own.mkdir()
    subprocess.run(["bash", entrypoint, "true"], check=True)
    assert stat.S_IMODE((own / "ssh").stat().st_mode) == 0o700
    look = ["ssh", "-G", "-F", own / "ssh/config", "h1"]
    settings = subprocess.check_output(look, text=True)
    assert f"identityfile {own}/ssh/key\n" in settings
    assert "stricthostkeychecking true\n" in settings

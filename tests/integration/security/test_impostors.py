"""A machine with another host key gets no rank, and one line says what to type."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import hosts as cluster
from tests.support.hosts import ON_HOSTS, OWN, SCRIPTS, Hosts
from tests.support.launching import output_of, started, wait_for

pytestmark = ON_HOSTS

CHANGED = "h2 has another ssh host key than the known one, so it may be another machine"
TRAINING = "digits --epochs 1 --device cpu --output-dir run"
LISTED = "h1 slots=1\nh2 slots=1\n"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Run h1 and h2; the user configures only the file of known keys."""
    with cluster.hosts(tmp_path / "cluster", 2, names=2) as found:
        (found.folder / "ssh_config").write_text(
            f"Host *\n  IdentityFile {found.folder}/user_key\n  UserKnownHostsFile "
            f'"{known_hosts(found)}"\n'
        )
        yield found


def known_hosts(hosts: Hosts) -> Path:
    return hosts.folder / "known hosts"


def replace_by_impostor(hosts: Hosts) -> None:
    """Let another machine, with its own key, answer under the name h2."""
    key = hosts.folder / "other_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    config = hosts.folder / "sshd_config"
    config.write_text(config.read_text().replace(f"{hosts.folder}/host_key", str(key)))
    hosts.kill("h2")
    (hosts.folder / "h2.log").unlink()
    hosts.boot("h2")


def typed(hosts: Hosts, folder: Path, line: str) -> list[str]:
    """Return the command that runs a script of horovodrun_scripts/ on h1."""
    script, *arguments = line.split()
    return hosts.inside("h1", folder, *OWN, f"HOME={folder}", f"{SCRIPTS}/{script}", *arguments)


def test_a_static_job_trusts_a_host_once(hosts: Hosts, tmp_path: Path) -> None:
    """The first key of a host is kept; the scripts refuse another one."""
    (tmp_path / "hostfile").write_text(LISTED)
    output_of(typed(hosts, tmp_path, f"train_hostfile.sh hostfile -- {TRAINING}"), tmp_path)
    assert known_hosts(hosts).read_text().startswith("h2 ssh-")
    replace_by_impostor(hosts)
    for name in ("train_hostfile.sh", "train_mpirun.sh"):
        command = typed(hosts, tmp_path, f"{name} hostfile -- {TRAINING}")
        output = output_of(command, tmp_path, code=2)
        assert output.startswith(f"hvd-train: {CHANGED}; if you know why")
        assert len(output.splitlines()) == 1
    assert not hosts.workers("h2")


def test_an_elastic_job_continues_without_an_impostor(hosts: Hosts, tmp_path: Path) -> None:
    """ssh refuses it, and the other host trains."""
    first = "ssh -o StrictHostKeyChecking=accept-new h2 true"
    subprocess.run(hosts.inside("h1", tmp_path, *first.split()), check=True)
    replace_by_impostor(hosts)
    (tmp_path / "hostfile").write_text(LISTED)
    command = typed(hosts, tmp_path, f"train_elastic.sh --hosts hostfile -np 1 -- {TRAINING}")
    log = tmp_path / "output.txt"
    with started(command, tmp_path, log) as launcher:
        wait_for(
            "the line", lambda: launcher.poll() is not None or "HAS CHANGED" in log.read_text()
        )
        assert not hosts.workers("h2")
        code = launcher.wait(280)
    assert code == 0, log.read_text()

"""`hvd-train why` names what holds a rank on another host than the one that asks."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hangs import ANSWERS, check_answer
from tests.support.hosts import ON_HOSTS, OWN, SCRIPTS, WAYS, Hosts, hosts_fixture, list_hosts
from tests.support.launching import HVD_TRAIN, output_of

pytestmark = ON_HOSTS

three_hosts = hosts_fixture(3, scope="module")


@pytest.fixture
def hosts(three_hosts: Hosts) -> Iterator[Hosts]:
    """Return three hosts, and kill the ranks that are left at the end; `node2` is h2 for ssh."""
    with (three_hosts.folder / "ssh_config").open("a") as file:
        file.write("Host node2\n  HostName h2\n")
    yield three_hosts
    three_hosts.plug("h2")
    for name in three_hosts.inits:  # ranks, and loader processes that hang
        three_hosts.signal_all(name, signal.SIGKILL)


@pytest.mark.parametrize(
    ("way", "loop", "how"),
    [
        *(("horovodrun, Gloo", "session", how) for how in ANSWERS if how != "start"),
        ("horovodrun, MPI", "session", "lock"),
        ("horovodrun, MPI", "train", "loader"),
        ("mpirun", "session", "skip"),
        ("mpirun", "train", "regex"),
        ("elastic", "session", "loop"),
        ("elastic", "train", "lock"),
    ],
)
def test_what_holds_a_rank_of_another_host(
    way: str, loop: str, how: str, hosts: Hosts, tmp_path: Path
) -> None:
    name = "h2" if "mpi" in way.lower() else "node2"  # an alias, which MPI's ranks do not know
    first = "h3" if how == "parted" else "h1"
    list_hosts(tmp_path, [f"{first} slots=1", f"{name} slots=1"])
    script, *options = WAYS[way]
    words = [str(SCRIPTS / script), *options, "--", "python", "mine.py", loop, how]
    job = hosts.inside("h1", tmp_path, *OWN, *words)
    why = hosts.inside("h1", tmp_path, *OWN, HVD_TRAIN, "why", "run")

    def stop() -> None:
        members = json.loads((tmp_path / "run/ranks.json").read_text())
        kill = ["kill", "-STOP", str(members[1]["process"])]
        output_of(hosts.inside("h2", tmp_path, *kill), tmp_path)

    acts = {
        "stop": stop,
        "cut": lambda: hosts.unplug("h2"),
        "parted": lambda: hosts.part("h2", "h3"),
    }
    check_answer(how, tmp_path, job, why, host=name, act=acts.get(how))
    if how == "parted":
        hosts.part("h2", "h3", undo=True)

"""Trainings under torchrun, alone and on two hosts."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.hosts import (
    ON_HOSTS,
    OWN,
    OWN_LOOP,
    Hosts,
    Job,
    Training,
    arguments,
    check,
    hosts_fixture,
    undisturbed,
)
from tests.support.launching import (
    PROGRAMS,
    PROJECT,
    ranks_of,
    started,
)
from tests.support.on_demand import pace
from tests.support.runs import Weights
from tests.support.strangers import besieged, on, unharmed

pytestmark = ON_HOSTS

EPOCHS = 4
TORCHRUN = str(PROGRAMS / "torchrun")
SECRET = uuid4().hex
RENDEZVOUS = {
    "static": ["--node-rank={number}", "--master-addr=h1"],
    "c10d": ["--rdzv-backend=c10d", "--rdzv-endpoint=h1:29400"],
}
hosts = hosts_fixture(2, scope="module")


def test_a_script_restarted_by_torchrun_resumes(tmp_path: Path) -> None:
    """A rank is killed; scheduler, counter and evaluations are as in an undisturbed script."""
    script = [OWN_LOOP, "--output-dir", "run", "--ledger", "--device", "cpu"]
    (tmp_path / "alone").mkdir()
    expected = undisturbed(tmp_path / "alone", training=script)
    pace(tmp_path, 0.2)
    line = [TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1", *script]
    variables = {"PYTHONPATH": str(PROJECT)}
    with started(line, tmp_path, tmp_path / "output.txt", variables) as launcher:
        running = Training(tmp_path, launcher)
        running.after(15)
        rank_1 = next(
            rank for rank in ranks_of(launcher, OWN_LOOP) if rank.environ().get("RANK") == "1"
        )
        rank_1.kill()
        pace(tmp_path, 0)
        assert launcher.wait(280) == 0, running.output
    assert "resuming at epoch 1" in running.output
    check(running, expected)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), EPOCHS)


@contextmanager
def on_two_hosts(
    hosts: Hosts, folder: Path, rendezvous: str, secrets: tuple[str, str], *options: str
) -> Iterator[list[Job]]:
    """Run torchrun on both hosts, with a secret for each."""
    with ExitStack() as stack:
        jobs = []
        for number, (host, secret) in enumerate(zip(("h1", "h2"), secrets, strict=True)):
            where = [word.format(number=number) for word in RENDEZVOUS[rendezvous]]
            variables = [f"HVD_TRAIN_SECRET={secret}"] if secret else []
            line = ["torchrun", "--nnodes=2", *where, *options, "--no-python", "hvd-train", "train"]
            inside = hosts.inside(host, folder, *OWN, *variables, *line, *arguments(EPOCHS))
            output = folder / f"output-{host}.txt"
            jobs.append(Job(folder, stack.enter_context(started(inside, folder, output)), hosts))
        yield jobs


@pytest.mark.parametrize(("rendezvous", "victim"), [("static", "h2"), ("c10d", "h1")])
def test_a_killed_rank_is_restarted_on_two_hosts(
    rendezvous: str, victim: str, hosts: Hosts, tmp_path: Path, expected: Weights
) -> None:
    """The agents of c10d count restarts differently; without c10d the other rank ends later."""
    pace(tmp_path, 0.2)
    with on_two_hosts(hosts, tmp_path, rendezvous, (SECRET, SECRET), "--max-restarts=1") as jobs:
        jobs[0].after(15)
        jobs[0].worker(victim).kill()
        pace(tmp_path, 0)
        assert [job.launcher.wait(280) for job in jobs] == [0, 0], jobs[0].output
    assert "resuming at epoch 1" in jobs[0].output
    check(jobs[0], expected, EPOCHS)


@pytest.mark.parametrize(
    ("secrets", "says"),
    [
        (("", ""), "other hosts reach the port of this job: export the same HVD_TRAIN_SECRET"),
        ((SECRET, uuid4().hex), "is not signed by this job"),
    ],
)
def test_a_wrong_secret_is_one_line(
    secrets: tuple[str, str], says: str, hosts: Hosts, tmp_path: Path
) -> None:
    """The other host's rank ends with exit code 2."""
    with on_two_hosts(hosts, tmp_path, "static", secrets) as (_, other):
        assert other.launcher.wait(200) == 1
    printed = (tmp_path / "output-h2.txt").read_text()
    assert re.search(rf"^hvd-train: rank 1 on h2: .*{says}", printed, re.MULTILINE), printed
    assert re.search(r"exitcode *: 2 ", printed), printed


def test_two_hosts_survive_attacks_by_another_user(hosts: Hosts, tmp_path: Path) -> None:
    """Nothing runs or ends, and SECURITY.md names each port."""
    tmp_path.chmod(0o777)
    with (
        besieged(on(hosts), tmp_path / "owned", hosts) as ports,
        on_two_hosts(hosts, tmp_path, "static", (SECRET, SECRET)) as jobs,
    ):
        codes = [job.launcher.wait(280) for job in jobs]
    # Agents that end one after the other print a traceback.
    printed = re.sub(r"^E\d+ .* torch/distributed/.*\n", "", jobs[0].output, flags=re.MULTILINE)
    unharmed("torchrun, two hosts", ports, tmp_path / "run", max(codes), printed)
    assert printed.count("refused a request") == 1

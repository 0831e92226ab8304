"""What srun says of a rank, in Horovod's words."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from horovod.runner.http.http_server import RendezvousServer

from hvd_train.errors import UsageError
from hvd_train.launch import client, launcher, signature, slurm

# Of task 4 of 5, on the second of two nodes.
SAID = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu08",
}


def test_a_rank_of_a_step() -> None:
    """Its place on its node and across nodes, and where all meet."""
    assert slurm.alone(SAID)
    found = slurm.variables(SAID)
    expected = {"RANK": 4, "SIZE": 5, "LOCAL_RANK": 1, "LOCAL_SIZE": 2, "CROSS_RANK": 1, "CROSS_SIZE": 2}
    assert {name: int(found[f"HOROVOD_{name}"]) for name in expected} == expected
    assert found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "gpu07"
    assert 20_000 <= int(found["HOROVOD_GLOO_RENDEZVOUS_PORT"]) < 32_000
    third = {**SAID, "SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}
    assert slurm.variables(third)["HOROVOD_CROSS_SIZE"] == "1", "only the first node has a third rank"


def test_two_steps_have_two_ports() -> None:
    """Side by side on the same nodes; the user's own choice comes first."""
    ports = {
        slurm.variables({**SAID, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step})["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        for job in ("1234", "1235")
        for step in ("0", "1")
    }
    assert len(ports) == 4
    assert slurm.variables({**SAID, slurm.PORT: "4321"})["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4321"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script
        {**SAID, "SLURM_STEP_NUM_TASKS": "1"},
        {**SAID, "SLURM_STEP_NUM_TASKS": "²"},
        {**SAID, "HOROVOD_RANK": "0"},
        {**SAID, "PMI_RANK": "4"},
        {**SAID, "PMIX_RANK": "4"},
    ],
)
def test_others_are_not_ours(environ: dict[str, str]) -> None:
    """A batch script, a step of one task, and ranks that another launcher or a PMI looks after."""
    assert not slurm.alone(environ)


def test_a_step_is_a_launched_group() -> None:
    """So that one rank speaks for all; a batch script is none."""
    assert launcher.launched(SAID) == launcher.Launch("srun", 4, 5)
    assert launcher.launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


@pytest.mark.parametrize(
    ("text", "counts"), [("2", [2]), ("2(x3)", [2, 2, 2]), ("2(x2),1,4(x2)", [2, 2, 1, 4, 4]), ("1,1", [1, 1])]
)
def test_tasks_of_each_node(text: str, counts: list[int]) -> None:
    """Slurm's short form."""
    assert slurm.tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("nodes", "first"), [("h1", "h1"), ("gpu[03-05,9],login", "gpu03"), ("a-b,c", "a-b"), ("r[1-2]n5", "r1n5")]
)
def test_the_first_node(nodes: str, first: str) -> None:
    """Where rank 0 is."""
    assert slurm.first_node(nodes) == first


@pytest.mark.parametrize("missing", ["SLURM_STEP_NODELIST", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"])
def test_too_little_is_said(missing: str) -> None:
    """One line that names it."""
    with pytest.raises(UsageError, match=missing):
        slurm.variables({name: value for name, value in SAID.items() if name != missing})


@pytest.mark.parametrize("port", ["²", "x", "", "0", "65536", "-1"])
def test_a_port_that_is_none_is_said(port: str) -> None:
    """One line with the variable's name, before Horovod is told."""
    with pytest.raises(UsageError, match=f"^HVD_TRAIN_PORT is '{port}'; it must be the number of a port"):
        slurm.variables({**SAID, slurm.PORT: port})


@pytest.fixture
def task(tmp_path: Path) -> dict[str, str]:
    """The environment of a task, with a home of its own and a port at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    where = {client.ADDRESS: "127.0.0.1", client.PORT: str(port), "XDG_CACHE_HOME": str(tmp_path)}
    return {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", **where}


def test_rank_0_that_does_not_come(task: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Told with the place that was tried, not waited for for ever."""
    monkeypatch.setattr(slurm, "_PATIENCE_S", 0.0)
    place = f"rank 0 on 127.0.0.1 cannot be reached on port {task[client.PORT]}"
    with pytest.raises(UsageError, match=f"{place} .*no key of its own in .*7.1.key.*firewall.*home folder"):
        slurm.find_rank_0(task)
    slurm.KeyFile(task).write("a key")
    with pytest.raises(UsageError, match=f"{place} .*refused"):
        slurm.find_rank_0(task)


def test_tasks_find_rank_0_by_the_key_that_it_has_left(task: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that an earlier step has left is of no use, and is replaced."""
    key = signature.make_key()
    slurm.KeyFile(task).write("of an earlier step")
    monkeypatch.setenv(signature.KEY, key)
    server = RendezvousServer()
    task[client.PORT] = str(server.start(address="127.0.0.1"))
    timer = threading.Timer(0.3, lambda: slurm.KeyFile(task).write(key))
    timer.start()
    try:
        slurm.find_rank_0(task)
    finally:
        timer.join()
        server.stop()
    assert task[signature.KEY] == key


@pytest.mark.parametrize("exported", [{}, {signature.KEY: "of the job"}], ids=["key in the file", "key exported"])
def test_rank_0_that_will_not_come_has_told_why(task: dict[str, str], exported: dict[str, str]) -> None:
    """Its reason ends the other tasks at once and silently; the same job, queued again, knows nothing of it."""
    slurm.KeyFile(task).write_reason("port 23456 cannot be had")
    with pytest.raises(UsageError, match=r"^port 23456 cannot be had$") as ended:
        slurm.find_rank_0({**task, **exported})
    assert ended.value.reported
    assert slurm.KeyFile({**task, "SLURM_RESTART_COUNT": "1"}).read() is None


def test_a_process_without_the_key_is_not_rank_0(task: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listens first at the port, which follows from the job's number, is not believed."""
    monkeypatch.setenv(signature.KEY, "of somebody else")
    impostor = RendezvousServer()
    task |= {client.PORT: str(impostor.start(address="127.0.0.1")), signature.KEY: "of the job"}
    monkeypatch.setattr(slurm, "_PATIENCE_S", 0.0)
    try:
        with pytest.raises(UsageError, match="not signed by this job"):
            slurm.find_rank_0(task)
    finally:
        impostor.stop()


def test_no_other_account_can_read_or_plant_the_key(task: dict[str, str], tmp_path: Path) -> None:
    """Its folder and the file are the user's alone; a link in its place is neither followed nor believed."""
    file = slurm.KeyFile(task)
    file.write("a key")
    assert file.read() == "a key"
    assert (file.path.stat().st_mode & 0o777, file.path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    (tmp_path / "elsewhere").write_text("planted")
    file.remove()
    file.path.symlink_to(tmp_path / "elsewhere")
    assert file.read() is None
    file.write("another key")
    assert (file.read(), (tmp_path / "elsewhere").read_text()) == ("another key", "planted")


def test_a_home_that_cannot_be_written_is_told(task: dict[str, str], tmp_path: Path) -> None:
    """One line with what to type."""
    (tmp_path / "hvd_train").write_text("a file where a folder should be")
    with pytest.raises(UsageError, match=r"cannot write .*7\.1\.key.*export HOROVOD_RENDEZVOUS_KEY=.* before srun"):
        slurm.KeyFile(task).write("a key")

"""Ranks that srun or torchrun starts: the launcher's variables become Horovod's, and
ranks find rank 0 by their key.
"""

from pathlib import Path

import pytest
from horovod.runner.http.http_server import RendezvousServer

from hvd_train.errors import UsageError
from hvd_train.launch import client, rendezvous

# The last of five tasks, on the second of two nodes.
TASK_4 = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu08",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
}
# The second rank of the second of two hosts.
RANK_3 = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h1",
    "MASTER_PORT": "29500",
}
SECRET = "0123456789abcdef"
Environ = dict[str, str]
NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def numbers(found: Environ) -> list[int]:
    return [int(found[f"HOROVOD_{name}"]) for name in NUMBERS]


def key_of(environ: Environ) -> str:
    return rendezvous.variables(environ)[client.KEY]


def port_of(environ: Environ) -> str:
    return rendezvous.variables(environ)[client.PORT]


def test_a_task_of_slurm_gets_its_ranks_and_the_rendezvous() -> None:
    assert rendezvous.needed(TASK_4)
    for other in (
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"PMI_RANK": "4", "PMI_SIZE": "5"},
        {"PMIX_RANK": "4"},
    ):
        assert not rendezvous.needed({**TASK_4, **other})
    found = rendezvous.variables(TASK_4)
    assert numbers(found) == [4, 5, 1, 2, 1, 2]
    assert found[client.ADDRESS] == "gpu07"
    third = {**TASK_4, "SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}
    # only the first node has a third rank
    assert rendezvous.variables(third)["HOROVOD_CROSS_SIZE"] == "1"
    ports = {
        port_of({**TASK_4, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step})
        for job in ("1234", "1235")
        for step in ("0", "1")
    }
    assert len(ports) == 4
    assert port_of({**TASK_4, rendezvous.PORT: "4321"}) == "4321"
    assert rendezvous.tasks_per_node("2(x2),1,4(x2)") == [2, 2, 1, 4, 4]


def test_a_rank_of_torchrun_gets_its_ranks_and_the_rendezvous() -> None:
    """A launcher that sets neither local rank nor local size has a rank for each host."""
    rank_3 = {**RANK_3, rendezvous.SECRET: SECRET}
    assert rendezvous.needed(rank_3)
    assert not rendezvous.needed({**rank_3, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"})
    found = rendezvous.variables(rank_3)
    assert numbers(found) == [3, 4, 1, 2, 1, 2]
    assert found[client.ADDRESS] == "h1"
    assert found[client.PORT] == "30500"
    assert port_of({**rank_3, "MASTER_PORT": "65000"}) == "64000"
    one_each = {name: value for name, value in rank_3.items() if not name.startswith("LOCAL")}
    assert numbers(rendezvous.variables(one_each)) == [3, 4, 0, 1, 3, 4]
    on_one_host = {**RANK_3, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    assert rendezvous.variables(on_one_host)[client.ADDRESS] == client.LOOPBACK


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (TASK_4 | {"SLURM_LOCALID": "x"}, "srun has started this process, but .*'x'"),
        (TASK_4 | {rendezvous.PORT: "0"}, "HVD_TRAIN_PORT is '0'"),
        ({**RANK_3, "MASTER_PORT": ""}, "torchrun has started this process, but .*''"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "'LOCAL_WORLD_SIZE'"),
        ({**RANK_3, "LOCAL_RANK": "0"}, "the same number of ranks on each host, numbered by host"),
        ({**RANK_3, "GROUP_WORLD_SIZE": "3"}, "the same number of ranks on each host"),
        (RANK_3, "export the same HVD_TRAIN_SECRET on all hosts"),
        ({**RANK_3, rendezvous.SECRET: "short"}, "HVD_TRAIN_SECRET has fewer than 16 characters"),
        (
            {**RANK_3, rendezvous.SECRET_FILE: "/nowhere"},
            "HVD_TRAIN_SECRET_FILE: /nowhere: No such file",
        ),
    ],
)
def test_wrong_variables_are_named(environ: Environ, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        rendezvous.variables(environ)


def test_ranks_with_one_secret_have_one_key() -> None:
    """It differs between jobs, and a file may have the secret."""
    key = key_of({**RANK_3, rendezvous.SECRET: SECRET})
    Path("secret").write_text(f"{SECRET}\n")
    rank_3 = {**RANK_3, rendezvous.SECRET_FILE: "secret"}
    rank_0 = {**rank_3, "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    assert key_of(rank_0) == key
    assert key_of({**rank_3, "MASTER_PORT": "29501"}) != key
    assert key_of({**rank_3, "TORCHELASTIC_RUN_ID": "8"}) != key


def test_ranks_find_rank_0_by_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another step and a requeued job of Slurm have another key."""
    key = key_of(TASK_4)
    assert key_of(TASK_4) == key
    others = {
        key_of({**TASK_4, name: "2"})
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    }
    assert len({*others, key}) == 4
    assert key_of({**TASK_4, client.KEY: "from srun"}) == "from srun"
    monkeypatch.setenv(client.KEY, key)
    server = RendezvousServer()
    rank = {client.ADDRESS: "127.0.0.1", "HOROVOD_RANK": "1"}
    rank[client.PORT] = str(server.start(address="127.0.0.1"))
    monkeypatch.setattr(rendezvous, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(rendezvous, "_WRONG_KEY_S", 0.0)
    try:
        rendezvous.find_rank_0(rank)
        client.put(rank, "hvd_train.here.0/1", "yes")
        with pytest.raises(UsageError, match="has not ended since a rank was started again"):
            rendezvous.find_rank_0(rank)
        monkeypatch.setenv(client.KEY, others.pop())
        with pytest.raises(UsageError, match="not signed by this job"):
            rendezvous.find_rank_0(rank)
    finally:
        server.stop()


def test_no_other_account_can_read_or_plant_the_secret() -> None:
    key_of(TASK_4)
    file = Path(".cache/hvd_train/secret")
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [*file.parent.iterdir()] == [file]
    file.symlink_to(file.rename("planted").resolve())
    with pytest.raises(UsageError, match=r"secret \(Too many levels .*: export the same HVD_TRAIN"):
        key_of(TASK_4)
    file.unlink()
    file.write_text("")
    with pytest.raises(UsageError, match="it is no secret of this user"):
        key_of(TASK_4)

"""Ranks that srun starts: Slurm's variables become Horovod's, and tasks
find rank 0 by their key.
"""

from pathlib import Path

import pytest
from horovod.runner.http.http_server import RendezvousServer

from hvd_train.errors import UsageError
from hvd_train.launch import client, launcher, slurm

TASK_4 = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
}
TASK_4 |= {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_NODEID": "1", "SLURMD_NODENAME": "gpu08"}
TASK_4 |= {"SLURM_PROCID": "4", "SLURM_LOCALID": "1"}  # of 5 tasks, on the second of two nodes


def test_a_task_gets_its_ranks_and_the_rendezvous() -> None:
    assert slurm.alone(TASK_4)
    for other in (
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"PMI_RANK": "4", "PMI_SIZE": "5"},
        {"PMIX_RANK": "4"},
    ):
        assert not slurm.alone({**TASK_4, **other})
    assert launcher.launched(TASK_4) == launcher.Launch("srun", 4, 5)
    found = slurm.variables(TASK_4)
    expected = {
        "RANK": 4,
        "SIZE": 5,
        "LOCAL_RANK": 1,
        "LOCAL_SIZE": 2,
        "CROSS_RANK": 1,
        "CROSS_SIZE": 2,
    }
    assert {name: int(found[f"HOROVOD_{name}"]) for name in expected} == expected
    assert found[client.ADDRESS] == "gpu07"
    third = {**TASK_4, "SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}
    # only the first node has a third rank
    assert slurm.variables(third)["HOROVOD_CROSS_SIZE"] == "1"
    steps = [
        {**TASK_4, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}
        for job in ("1234", "1235")
        for step in ("0", "1")
    ]
    assert len({slurm.variables(step)[client.PORT] for step in steps}) == 4
    assert slurm.variables({**TASK_4, slurm.PORT: "4321"})[client.PORT] == "4321"
    assert slurm.tasks_per_node("2(x2),1,4(x2)") == [2, 2, 1, 4, 4]


def test_wrong_variables_are_named() -> None:
    with pytest.raises(UsageError, match="SLURM_LOCALID"):
        slurm.variables({name: value for name, value in TASK_4.items() if name != "SLURM_LOCALID"})


@pytest.fixture
def task(tmp_path: Path) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "1",
        client.ADDRESS: "127.0.0.1",
        "XDG_CACHE_HOME": str(tmp_path),
    }


def test_tasks_find_rank_0_by_their_key(
    task: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another step and a requeued job have another key."""
    key = slurm.key(task)
    assert slurm.key(task) == key
    others = {
        slurm.key({**task, name: "2"})
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    }
    assert len({*others, key}) == 4
    assert slurm.key({**task, client.KEY: "from srun"}) == "from srun"
    monkeypatch.setenv(client.KEY, key)
    server = RendezvousServer()
    task[client.PORT] = str(server.start(address="127.0.0.1"))
    monkeypatch.setattr(slurm, "_PATIENCE_S", 0.0)
    try:
        slurm.find_rank_0(task)
        monkeypatch.setenv(client.KEY, others.pop())
        with pytest.raises(UsageError, match="not signed by this job"):
            slurm.find_rank_0(task)
    finally:
        server.stop()


def test_no_other_account_can_read_or_plant_the_key(task: dict[str, str], tmp_path: Path) -> None:
    slurm.key(task)
    file = tmp_path / "hvd_train" / "srun.key"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [*file.parent.iterdir()] == [file]
    file.rename(tmp_path / "planted")
    file.symlink_to(tmp_path / "planted")
    with pytest.raises(
        UsageError, match=r"srun.key \(Too many levels .*: export HOROVOD_RENDEZVOUS_KEY="
    ):
        slurm.key(task)
    file.unlink()
    file.write_text("")
    with pytest.raises(UsageError, match="it is no secret of this user"):
        slurm.key(task)

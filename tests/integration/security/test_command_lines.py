"""Other users cannot read secrets of a job, and remote ranks get only what they need."""

import json
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.hosts import ON_HOSTS, ROOT, SCRIPTS, WAYS, Hosts
from tests.support.launching import started, wait_for
from tests.support.strangers import plant_key, spellings, spying

pytestmark = ON_HOSTS

# Random, as another run of these tests may be on the same machine.
SECRET = f"PLANTED-{uuid4().hex}".encode()
KEY = uuid4().hex.encode()
SECRETS = {**spellings("secret", SECRET), **spellings("key", KEY)}
CONTROL = f"everyone-may-read-this-{uuid4().hex[:8]}"


@pytest.fixture
def _planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put secrets into the environment and make the key of the job known."""
    for name in ("AWS_SECRET_ACCESS_KEY", "NAMED_SECRET"):
        monkeypatch.setenv(name, SECRET.decode())
    monkeypatch.setenv("NCCL_PLANTED", "two\nlines")
    monkeypatch.setenv("HOROVOD_PLANTED", "it's")
    monkeypatch.setenv("PYTHONPATH", f"{plant_key(tmp_path / 'site', KEY)}:{ROOT}")
    for name in ("OMP_NUM_THREADS", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HOME", str(tmp_path))  # Horovod caches facts about hosts there


@pytest.mark.usefixtures("_planted")
@pytest.mark.parametrize("way", WAYS)
def test_no_other_user_reads_a_secret_of_a_job(way: str, hosts: Hosts, tmp_path: Path) -> None:
    """No process on either host shows one; the other host gets what training
    needs and what --env names.
    """
    (tmp_path / "hostfile").write_text("h1 slots=1\nh2 slots=1\n")
    script, *options = WAYS[way]
    training = [
        "digits",
        "--epochs",
        "1",
        "--device",
        "cpu",
        "--output-dir",
        str(tmp_path / CONTROL),
    ]
    line = [str(SCRIPTS / script), *options, "--env", "NAMED_SECRET", "--", *training]
    command = hosts.inside("h1", tmp_path, *line)
    log = tmp_path / "output.txt"
    with (
        spying({**SECRETS, "control": CONTROL.encode()}) as seen,
        started(command, tmp_path, log) as launcher,
    ):
        wait_for(
            "workers", lambda: launcher.poll() is not None or all(map(hosts.workers, ("h1", "h2")))
        )
        assert launcher.poll() is None, log.read_text()
        here, there = (hosts.workers(name)[0].environ() for name in ("h1", "h2"))
        code = launcher.wait(280)
    assert code == 0, log.read_text()
    assert json.loads((tmp_path / CONTROL / "summary.json").read_text())["world_size"] == 2
    assert "AWS_SECRET_ACCESS_KEY" not in there
    assert here["AWS_SECRET_ACCESS_KEY"] == there["NAMED_SECRET"] == SECRET.decode()
    assert (there["NCCL_PLANTED"], there["HOROVOD_PLANTED"]) == ("two\nlines", "it's")
    assert len(seen.pop("control")) >= 3, "neither the launcher nor its ranks were seen"
    assert not seen

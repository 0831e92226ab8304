"""Patches of horovodrun: checked hosts, private environments, signed requests."""

import os
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from horovod.runner import mpi_rank
from horovod.runner.common.util.outcome import JobFailedError
from horovod.runner.driver import driver_service
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.util import network, worker_environment

from hvd_train.launch import client
from tests.support.launching import write_program

LOOPBACK = "127.0.0.1"

# Environments of ranks (patch S2)
NEEDED = (
    "PATH LD_LIBRARY_PATH PYTHONPATH HOROVOD_RENDEZVOUS_KEY HVD_TRAIN_PORT NCCL_DEBUG TZ "
    "OMP_NUM_THREADS https_proxy NO_PROXY CUDA_HOME TORCH_HOME LC_ALL UCX_TLS OMPI_MCA_x"
)
PRIVATE = (
    "AWS_SECRET_ACCESS_KEY WANDB_API_KEY HF_TOKEN SSH_AUTH_SOCK HOME USER MY_PATH PATH_TO_KEY "
    "PMIX_SERVER_URI SLURM_JOB_ID OMPI_COMM_WORLD_RANK CUDA_VISIBLE_DEVICES BASH_FUNC_x%% OMP_a.b"
)


def test_other_hosts_get_the_variables_that_training_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {*NEEDED.split()}
    variables = dict.fromkeys([*needed, *PRIVATE.split()], "value")
    assert worker_environment.for_other_hosts(variables).keys() == needed
    variables["HVD_TRAIN_ENV"] = "HF_TOKEN, WANDB_API_KEY,,NOT_SET"
    more = {"HVD_TRAIN_ENV", "HF_TOKEN", "WANDB_API_KEY"}
    assert worker_environment.for_other_hosts(variables).keys() == needed | more
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    here = worker_environment.for_this_host({"HOROVOD_RANK": "1"})
    assert (here["AWS_SECRET_ACCESS_KEY"], here["HOROVOD_RANK"]) == ("hunter2", "1")


@pytest.mark.parametrize("text", ["AWS_KEY=hunter2", "A;hunter2"])
def test_a_value_instead_of_a_name_is_an_error(text: str) -> None:
    with pytest.raises(JobFailedError, match="HVD_TRAIN_ENV takes names of variables") as caught:
        worker_environment.for_other_hosts({"HVD_TRAIN_ENV": f"GOOD,{text}"})
    assert caught.value.exit_code == 2
    assert "=" not in str(caught.value)


AWKWARD = {
    "A": "two\nlines\n",
    "B": 'it\'s "$HOME" `id` \\',
    "C": os.fsdecode(b"\xff\xfe"),
    "E": "",
}
SHOW = (
    "import os, sys; print(os.getcwd(), [os.environb.get(b'%c' % n) for n in b'ABCE'], "
    "repr(sys.stdin.read()))"
)


def test_variables_arrive_whole_through_standard_input() -> None:
    """No value is on the command line; incomplete input runs nothing."""
    folder = Path("it's a folder").absolute()
    folder.mkdir()
    command = f"exec env X=1 {shlex.join([sys.executable, '-c', SHOW])}"
    script, given = worker_environment.on_other_host(command, AWKWARD, str(folder))
    assert not any(value and value in script for value in AWKWARD.values())
    values = [os.fsencode(value) for value in AWKWARD.values()]
    for shell in ("sh", "bash"):
        done = subprocess.run([shell, "-c", script], input=given, capture_output=True, check=True)
        assert done.stdout.decode() == f"{folder} {values} ''\n"
    script, given = worker_environment.on_other_host(
        "exec touch started", {"HOROVOD_RANK": "1"}, str(folder)
    )
    for end in range(len(given) - 2):
        subprocess.run(["sh", "-c", script], input=given[:end], capture_output=True, check=False)
    assert not list(folder.iterdir())


# Values for all ranks (patch C14)
def test_the_store_waits_until_all_ranks_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(client.KEY, "the key")
    server = RendezvousServer()
    port = server.start(address=LOOPBACK)
    environ = {client.ADDRESS: LOOPBACK, client.PORT: str(port)}
    assert client.get(environ, "global/0-of-3") == ""  # after a second
    ranks = ("0", "1", "2", "all")
    with ThreadPoolExecutor(4) as pool:
        asked = pool.map(lambda rank: client.get(environ, f"global/{rank}-of-3"), ranks)
        for rank, parts in enumerate(("0to10to2", "1to01to2", "2to02to1")):
            client.put(environ, f"global/{rank}", parts)
        found = [*asked]
    server.stop()
    assert found == ["1to02to0", "0to12to1", "0to21to2", "0to10to2\n1to01to2\n2to02to1"]


# The interface between hosts (patch S4)
def test_a_name_that_only_ssh_knows_has_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path, "ssh", f'[ "$3" = unknown ] || echo "hostname {LOOPBACK}"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(network, "resolve_host_address", {LOOPBACK: LOOPBACK}.get)
    settings = SimpleNamespace(nics=None, verbose=0)
    assert driver_service.get_common_interfaces(settings, ["h1", "alias"], ["alias"]) == [LOOPBACK]
    with pytest.raises(
        ValueError, match=r"no address is known for unknown.* --network-interfaces eth0$"
    ):
        driver_service.get_common_interfaces(settings, ["h1", "unknown"], ["unknown"])


def test_a_rank_keeps_the_interface_that_the_user_named() -> None:
    environ = {mpi_rank.ROUTE_TO: LOOPBACK, "NCCL_SOCKET_IFNAME": "ib0"}
    mpi_rank.choose_interface(environ)
    assert environ["HOROVOD_GLOO_IFACE"] == environ["OMPI_MCA_btl_tcp_if_include"] == "lo"
    assert environ["NCCL_SOCKET_IFNAME"] == "ib0"


# The guard of an MPI rank (patch L1)
def guard(script: str) -> subprocess.Popen[str]:
    """Run a script for a shell as a rank, and wait until it trains."""
    command = shlex.join(["sh", "-c", script])
    rank = [sys.executable, "-I", "-S", mpi_rank.__file__, "300", command]
    started = subprocess.Popen(
        rank,
        env={**os.environ, "PMI_RANK": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert started.stdout.readline() == "trains\n"
    return started


def test_a_guarded_rank_commits_and_its_code_is_reported() -> None:
    """The guard stays until mpirun ends it, because mpirun would kill
    the other ranks at its end.
    """
    commits = "trap 'sleep 0.2; echo committed; exit 3' TERM"
    with guard(f"{commits}; echo trains; while :; do sleep 0.02; done") as rank:
        rank.send_signal(signal.SIGUSR1)
        lines = [rank.stdout.readline() for _ in range(3)]
        report = f"{mpi_rank.NOTICE.format(3, 3)}\n"
        assert lines == ["committed\n", report, report]  # repeated as long as the guard lives
        rank.terminate()
        assert rank.wait(60) == -signal.SIGTERM


def test_a_rank_ends_with_its_guard() -> None:
    with guard("echo trains; exec sleep 1000") as rank:
        rank.kill()
        assert rank.stdout.read() == ""

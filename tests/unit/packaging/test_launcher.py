"""Patches of horovodrun: checked hosts and host keys, private environments, signed requests."""

import base64
import io
import os
import pickle
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from horovod.runner import launch
from horovod.runner.common.util import hosts
from horovod.runner.common.util.outcome import JobFailedError
from horovod.runner.http import http_client, signature
from horovod.runner.http.http_server import KVStoreServer
from horovod.runner.util import host_keys, remote, ways, worker_environment

from hvd_train.doctor import cluster
from tests.support.faults import Malicious, answering
from tests.support.launching import write_program
from tests.support.strangers import attack

SCRIPT = Path(__file__).parents[3] / "horovodrun_scripts/_launch.sh"
LOOPBACK = "127.0.0.1"

# Lists of hosts (patch L2)
OPTION = "no host has a name that begins with -, which ssh takes as an option"


def test_a_wrong_list_of_hosts_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOROVOD_RENDEZVOUS_KEY", "the launcher sets its own")
    monkeypatch.setattr(launch, "outlive", lambda: None)
    form = '"h1" in the list of hosts is not of the form NAME:SLOTS'
    for controller, listed, message in (
        ("gloo", "h1:1,-G:1", OPTION),
        ("mpi", "-ox=y:1", OPTION),
        ("gloo", "h1", form),
    ):
        monkeypatch.setattr("sys.argv", ["horovodrun", f"--{controller}", "-np", "1", f"--hosts={listed}", "true"])
        with pytest.raises(SystemExit) as ended:
            launch.run_commandline()
        error = capsys.readouterr().err
        assert (ended.value.code, error.count("\n")) == (2, 1)
        assert message in error


def test_a_wrong_host_file_is_named() -> None:
    with pytest.raises(hosts.HostsError, match=r"cannot read the host file hosts: "):
        hosts.parse_host_files("hosts")
    for line in ("-G slots=1", "-G:1"):
        Path("hosts").write_text(f"h1 slots=1\n{line}\n")
        with pytest.raises(hosts.HostsError, match=f'hosts, line 2: "{line}" is not of the form .*; {OPTION}$'):
            hosts.parse_host_files("hosts")


# Host keys (patch S2)
ACCEPT = "-o StrictHostKeyChecking=accept-new"
CHANGED = f"""{"@" * 59}
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
{"@" * 59}
Add correct host key in /home/me/a folder/known_hosts to get rid of this message.
Offending ED25519 key in /home/me/a folder/known_hosts:1
Host key for [h2]:2222 has changed and you have requested strict checking.
Host key verification failed.
"""
LINE = (
    "h2 has another ssh host key than the known one, so it may be another machine; if you know why, "
    "forget the old key: ssh-keygen -f '/home/me/a folder/known_hosts' -R '[h2]:2222'"
)


@pytest.mark.parametrize(("configured", "option"), [("ask", ACCEPT), ("true", ""), ("accept-new", ""), (None, "")])
def test_new_host_keys_are_accepted_unless_the_user_has_configured_otherwise(
    configured: str | None, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod, the doctor and the scripts agree."""
    says = "exit 255" if configured is None else f"echo user me; echo stricthostkeychecking {configured}; echo port 22"
    write_program(tmp_path, "ssh", f'[ "$*" = "-G -- h2" ] || exit 9; {says}')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert " ".join(cluster.new_keys("h2")) == option
    ours = subprocess.run(["bash", "-c", f'source "{SCRIPT}"; new_keys h2'], capture_output=True, text=True, check=True)
    assert ours.stdout.strip() == option
    words = remote.get_ssh_command("true", "h2").split()
    assert words == ["ssh", "-o", "PasswordAuthentication=no", *option.split(), "--", "h2", "true"]


def test_a_refused_host_key_is_one_line_with_what_to_type() -> None:
    assert host_keys.problem("h2", CHANGED) == LINE
    assert host_keys.problem("h2", "ssh: connect to host h2 port 22: Connection refused\n") is None
    unknown = "No ED25519 host key is known for h2 and you have requested strict checking."
    line = host_keys.problem("h2", f"{unknown}\nHost key verification failed.\n")
    assert line is not None
    assert line.endswith("to compare and accept it: ssh -o StrictHostKeyChecking=ask h2 true")


def test_the_line_replaces_the_warning_of_ssh() -> None:
    def passed_on(text: str) -> str:
        stream = io.StringIO()
        filtered = host_keys.OneLine(stream, "h2")
        for line in text.splitlines(keepends=True):
            filtered.write(f"[1]<stderr>:{line}")
            filtered.flush()
        filtered.close()
        return stream.getvalue()

    assert passed_on(f"before\n{CHANGED}after\n") == f"[1]<stderr>:before\nhorovodrun: {LINE}\n[1]<stderr>:after\n"
    trains = CHANGED.replace("Host key verification failed.\n", "") + "".join(f"step {n}\n" for n in range(40))
    assert passed_on(trains) == "".join(f"[1]<stderr>:{line}" for line in trains.splitlines(keepends=True))


def test_an_operator_without_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeflow's kubexec.sh would start ranks without their environment."""
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh")
    assert remote.get_remote_command("true", "h2") == "/etc/mpi/kubexec.sh h2 true"
    with pytest.raises(JobFailedError, match=r"kubexec\.sh gives commands no standard input") as caught:
        remote.get_remote_command("true", "h2", reads_stdin=True)
    assert caught.value.exit_code == 2


# Environments of ranks (patch S2)
NEEDED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOROVOD_RENDEZVOUS_KEY", "HVD_TRAIN_HOSTS", "NCCL_DEBUG", "TZ"),
    *("OMP_NUM_THREADS", "https_proxy", "NO_PROXY", "CUDA_HOME", "TORCH_HOME", "LC_ALL", "UCX_TLS", "OMPI_MCA_x"),
)
PRIVATE = (
    *("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN", "SSH_AUTH_SOCK", "HOME", "USER", "MY_PATH", "PATH_TO_KEY"),
    *("PMIX_SERVER_URI", "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "CUDA_VISIBLE_DEVICES", "BASH_FUNC_x%%", "OMP_a.b"),
)


def test_other_hosts_get_the_variables_that_training_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = dict.fromkeys((*NEEDED, *PRIVATE), "value")
    assert set(worker_environment.for_other_hosts(variables)) == set(NEEDED)
    more = {**variables, "HVD_TRAIN_ENV": "HF_TOKEN, WANDB_API_KEY,,NOT_SET"}
    assert set(worker_environment.for_other_hosts(more)) - set(NEEDED) == {"HVD_TRAIN_ENV", "HF_TOKEN", "WANDB_API_KEY"}
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    here = worker_environment.for_this_host({"HOROVOD_RANK": "1"})
    assert (here["AWS_SECRET_ACCESS_KEY"], here["HOROVOD_RANK"]) == ("hunter2", "1")


def test_a_value_instead_of_a_name_is_an_error() -> None:
    for text in ("AWS_KEY=hunter2", "A;hunter2"):
        with pytest.raises(JobFailedError, match="HVD_TRAIN_ENV takes names of variables") as caught:
            worker_environment.for_other_hosts({"HVD_TRAIN_ENV": f"GOOD,{text}"})
        assert caught.value.exit_code == 2
        assert "=" not in str(caught.value)


AWKWARD = {"A": "two\nlines\n", "B": 'it\'s "$HOME" `id` \\', "C": os.fsdecode(b"\xff\xfe"), "E": ""}
SHOW = "import os, sys; print(os.getcwd(), [os.environb.get(b'%c' % n) for n in b'ABCE'], repr(sys.stdin.read()))"


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
    script, given = worker_environment.on_other_host("exec touch started", {"HOROVOD_RANK": "1"}, str(folder))
    for end in range(len(given) - 2):
        subprocess.run(["sh", "-c", script], input=given[:end], capture_output=True, check=False)
    assert not list(folder.iterdir())


# `horovod.run(function)`: the store of the function (patch S1)
@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv(signature.KEY, signature.make_key())
    server = KVStoreServer(verbose=0)
    port = server.start_server(address=LOOPBACK)
    http_client.put_data_into_kvstore(LOOPBACK, port, "runfunc", "func", "the function")
    yield port
    server.shutdown_server()


def test_only_the_job_reads_and_changes_its_function(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    key = signature.key_of_job()
    for other in ("", signature.make_key()):
        monkeypatch.setenv(signature.KEY, other)
        with pytest.raises(RuntimeError, match="403"):
            http_client.put_data_into_kvstore(LOOPBACK, port, "runfunc", "func", "another function")
        with pytest.raises(RuntimeError, match="403"):
            http_client.read_data_from_kvstore(LOOPBACK, port, "runfunc", "func")
    monkeypatch.setenv(signature.KEY, key)
    with socket.create_connection((LOOPBACK, port)):
        assert http_client.read_data_from_kvstore(LOOPBACK, port, "runfunc", "func") == "the function"


def test_an_unsigned_answer_is_not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signature.KEY, signature.make_key())
    body = base64.b64encode(pickle.dumps(Malicious()))
    for signed in ("", f"{signature.SIGNATURE}: {'0' * 64}\r\n"):
        answer = f"HTTP/1.0 200 OK\r\nContent-Length: {len(body)}\r\n{signed}\r\n".encode() + body
        with answering(answer) as port, pytest.raises(RuntimeError, match="not signed by this job"):
            http_client.read_data_from_kvstore(LOOPBACK, port, "runfunc", "func")
    assert not Path("owned").exists()


# The search for common interfaces (patch S4)
HERE = {"theirs": [LOOPBACK]}


@pytest.fixture
def _key_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signature.KEY, signature.make_key())
    monkeypatch.setattr(ways, "_TRY_S", 60.0)
    monkeypatch.setattr(ways, "_ALL_S", 60.0)


@pytest.mark.usefixtures("_key_and_time")
def test_a_host_finds_its_own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    with ways._listening() as port:
        assert ways.reached({**HERE, "off": ["no address"]}, port) == {"theirs": ["lo"]}
        monkeypatch.setattr(ways, "_interfaces", lambda: {"eth0": ["10.9.8.7"]})
        assert ways.reached(HERE, port) == {}
    assert ways.reached(HERE, port) == {}


@pytest.mark.usefixtures("_key_and_time")
def test_an_impostor_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts often share an address where another user may listen."""
    for signed in ("", f"{signature.SIGNATURE}: {'0' * 64}\r\n"):
        with answering(f"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n{signed}\r\n{LOOPBACK}".encode()) as port:
            assert ways.reached(HERE, int(port)) == {}
    monkeypatch.setattr(ways, "_TRY_S", 600.0)
    monkeypatch.setattr(ways, "_ALL_S", 0.3)
    with socket.create_server((LOOPBACK, 0)) as server:
        assert ways.reached(HERE, server.getsockname()[1]) == {}


@pytest.mark.usefixtures("_key_and_time")
def test_the_search_survives_unauthenticated_clients(capfd: pytest.CaptureFixture[str]) -> None:
    """Their code does not run, half a message delays nothing, and one line reports them."""
    with ways._listening() as port:
        attack((LOOPBACK, port), Path("owned").absolute())
        assert ways.reached(HERE, port) == {"theirs": ["lo"]}
        with socket.create_connection((LOOPBACK, port)) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(1000), b""))
    assert b" 403 " in answer and LOOPBACK.encode() not in answer
    assert not Path("owned").exists()
    errors = capfd.readouterr().err
    assert errors.count("refused a request") == errors.count("\n") == 1

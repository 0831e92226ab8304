"""The user's word on host keys counts, and a key that is refused is one line with what to type."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest
from horovod.runner.common.util.outcome import JobFailedError
from horovod.runner.util import host_keys, remote

from hvd_train.launch import ssh
from tests.support.programs import write_program

SCRIPT = Path(__file__).parents[3] / "horovodrun_scripts/_launch.sh"
ACCEPT = "-o StrictHostKeyChecking=accept-new"
EDGE = "@" * 59
CHANGED = f"""{EDGE}
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
{EDGE}
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Someone could be eavesdropping on you right now (man-in-the-middle attack)!
It is also possible that a host key has just been changed.
The fingerprint for the ED25519 key sent by the remote host is
SHA256:abc.
Please contact your system administrator.
Add correct host key in /home/me/a folder/known_hosts to get rid of this message.
Offending ED25519 key in /home/me/a folder/known_hosts:1
Host key for [h2]:2222 has changed and you have requested strict checking.
Host key verification failed.
"""
LINE = (
    "h2 has another ssh host key than the one that is known here, so it may be another machine; if you know why, "
    "forget the old key: ssh-keygen -f '/home/me/a folder/known_hosts' -R '[h2]:2222'"
)


@pytest.mark.parametrize(
    ("configured", "option"), [("ask", ACCEPT), ("true", ""), ("false", ""), ("accept-new", ""), (None, "")]
)
def test_the_users_word_counts(
    configured: str | None, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod, the doctor and the scripts take new keys where the configuration says nothing, and only there."""
    says = "exit 255" if configured is None else f"echo user me; echo stricthostkeychecking {configured}; echo port 22"
    write_program(tmp_path, "ssh", f'[ "$*" = "-G -- h2" ] || exit 9; {says}')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert host_keys.option("h2") == option
    assert " ".join(ssh.new_keys("h2")) == option
    ours = subprocess.run(["bash", "-c", f'source "{SCRIPT}"; new_keys h2'], capture_output=True, text=True, check=True)
    assert ours.stdout.strip() == option
    words = remote.get_ssh_command("true", "h2").split()
    assert words == ["ssh", "-o", "PasswordAuthentication=no", *option.split(), "--", "h2", "true"]


def test_a_changed_key_is_one_line_with_what_to_type() -> None:
    """It names the host, and the file in which ssh knows it, under its name there."""
    assert host_keys.problem("h2", CHANGED) == LINE
    assert host_keys.problem("h2", "ssh: connect to host h2 port 22: Connection refused\n") is None


def test_an_unknown_key_that_the_user_wants_refused() -> None:
    """Where the configuration is strict, the line says how to take the key after all."""
    said = (
        "No ED25519 host key is known for h2 and you have requested strict checking.\nHost key verification failed.\n"
    )
    line = host_keys.problem("h2", said)
    assert line is not None
    assert line.endswith("to compare and accept it: ssh -o StrictHostKeyChecking=ask h2 true")


def passed_on(text: str) -> str:
    """What comes out where ssh and its command print `text`, line by line with a rank in front."""
    stream = io.StringIO()
    filtered = host_keys.OneLine(stream, "h2")
    for line in text.splitlines(keepends=True):
        filtered.write(f"[1]<stderr>:{line}")
        filtered.flush()
    filtered.close()
    return stream.getvalue()


def test_the_line_stands_in_the_place_of_sshs_warning() -> None:
    """All else that the ssh prints is passed on as it is."""
    assert passed_on(f"before\n{CHANGED}after\n") == f"[1]<stderr>:before\nhorovodrun: {LINE}\n[1]<stderr>:after\n"


@pytest.mark.parametrize(
    "ends", ["Keyboard-interactive authentication is disabled to avoid man-in-the-middle attacks.\n", ""]
)
def test_where_the_key_does_not_matter_nothing_is_lost(ends: str) -> None:
    """With StrictHostKeyChecking=no ssh warns and goes on; what the rank prints then is not held back for long."""
    said = CHANGED.replace("Host key verification failed.\n", ends) + "".join(f"step {n}\n" for n in range(40))
    assert passed_on(said) == "".join(f"[1]<stderr>:{line}" for line in said.splitlines(keepends=True))


def test_an_operator_without_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeflow's kubexec.sh would start ranks without their environment; whoever needs none still goes through it."""
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh")
    assert remote.get_remote_command("true", "h2") == "/etc/mpi/kubexec.sh h2 true"
    with pytest.raises(JobFailedError, match=r"kubexec\.sh gives commands no standard input") as caught:
        remote.get_remote_command("true", "h2", reads_stdin=True)
    assert caught.value.exit_code == 2

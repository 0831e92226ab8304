"""The ssh of the image, whose key only its own user can read."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import PROJECT

pytestmark = pytest.mark.integration


def test_ssh_in_the_image_reads_nothing_that_others_could_write() -> None:
    """In Apptainer the folders for temporary files are the machine's: no file of ssh lies there, now or later."""
    packaging = PROJECT / "packaging"
    texts = [(packaging / f"image_{name}").read_text() for name in ("ssh_config", "sshd_config", "entrypoint.sh")]
    paths = {path for text in texts for path in re.findall(r"(?<![\w$}])/[\w./-]+", re.sub(r"(?m)^\s*#.*", "", text))}
    assert "/var/lib/hvd_train/ssh/config" in paths
    assert not [path for path in paths if path.startswith(("/tmp", "/var/tmp", "/dev/shm", "/run", "/home"))]
    assert "install -d -m 700 -o trainer -g trainer /var/lib/hvd_train\n" in (PROJECT / "Dockerfile").read_text()


@pytest.fixture
def entrypoint(tmp_path: Path) -> Path:
    """Return the entrypoint of the image for folders below this one, with a key that containers share."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    text = (PROJECT / "packaging" / "image_entrypoint.sh").read_text()
    for there, here in (("/etc/hvd_train/ssh", "shared"), ("/var/lib/hvd_train", "own")):
        text = text.replace(there, str(tmp_path / here))
    (tmp_path / "entrypoint.sh").write_text(text)
    (tmp_path / "shared").mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "shared" / "id_x"], check=True)
    return tmp_path / "entrypoint.sh"


def test_the_key_of_a_container_is_its_users_alone(entrypoint: Path) -> None:
    """What ssh reads lies in a folder of mode 0700, and ssh finds the key in it."""
    (entrypoint.parent / "own").mkdir()
    subprocess.run(["bash", entrypoint, "true"], check=True)
    own = entrypoint.parent / "own" / "ssh"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    told = subprocess.run(["ssh", "-G", "-F", own / "config", "h1"], check=True, capture_output=True, text=True).stdout
    assert f"identityfile {own}/key\n" in told
    assert "stricthostkeychecking true\n" in told


def test_a_container_without_a_place_for_its_key_is_one_line(entrypoint: Path) -> None:
    """Under another user id the folder is not writable: one line says what to do, and nothing starts."""
    (entrypoint.parent / "own").write_text("")
    done = subprocess.run(["bash", entrypoint, "echo", "started"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hvd_train image: user ")
    assert done.stderr.endswith("or mount a folder there\n")
    assert done.stderr.count("\n") == 1

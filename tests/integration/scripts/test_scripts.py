"""The scripts: each is one command, and passes arguments on as typed."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.launching import AWKWARD, LOCALHOST, PROJECT, PYTHON, SCRIPTS, run, write_program

pytestmark = pytest.mark.integration


def test_own_environment_is_found_from_a_path_with_blanks(tmp_path: Path) -> None:
    """If hvd-train is not on the PATH, the clone's own .venv is used, even through a link;
    if it has none, one line.
    """
    system = tmp_path / "system only"
    system.mkdir()
    for name in ("bash", "dirname", "env", "grep", "nproc", "readlink", "sed", "tr"):
        (system / name).symlink_to(shutil.which(name) or name)
    clone = tmp_path / "my clone's folder"
    shutil.copytree(SCRIPTS, clone / "horovodrun_scripts")
    link = tmp_path / "train"
    link.symlink_to(clone / "horovodrun_scripts" / "train_local.sh")
    missing = run(link, cwd=tmp_path, PATH=str(system))
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("there is no hvd-train: type make -C ")
    assert missing.stderr.count("\n") == 1
    write_program(clone / ".venv/bin", "hvd-train", 'for word in "$@"; do echo "<$word>"; done')
    real = run(link, "--", "a b", cwd=tmp_path, PATH=str(system))
    assert (real.returncode, real.stdout, real.stderr) == (0, "<launch>\n<-->\n<a b>\n", "")


def test_containers_need_no_package_here(tmp_path: Path) -> None:
    """The first host of train_docker.sh may have nothing but Python and Docker."""
    # without site-packages
    bare = write_program(tmp_path / "bin", "python3", f'exec {PYTHON} -S "$@"')
    path = f"{bare.parent}:/usr/bin:/bin"
    done = run("train_docker.sh", LOCALHOST, "--dry-run", "--", "digits", cwd=tmp_path, PATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "docker start --attach" in done.stdout


@pytest.mark.slow
def test_shellcheck_has_no_complaint() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not on this machine: apt install shellcheck")
    folders = ((SCRIPTS, "*.sh"), (SCRIPTS, "*.sbatch"), (PROJECT / "packaging", "*.sh"))
    scripts = [str(path) for folder, pattern in folders for path in sorted(folder.glob(pattern))]
    command = ["shellcheck", "--external-sources", *scripts]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("script", "controller"),
    [(["train_local.sh", "-n", "2"], "--gloo"), (["train_hostfile.sh", LOCALHOST], "--mpi")],
    ids=["local gloo", "hostfile mpi"],
)
def test_arguments_arrive_as_typed(
    script: list[str | Path], controller: str, tmp_path: Path
) -> None:
    """Blanks, quotes, `;`, `$()` and line breaks reach every rank unchanged, over Gloo and MPI."""
    record = (
        "import json, os, pathlib, sys\n"
        "rank = os.environ.get('HOROVOD_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        "pathlib.Path(f'rank-{rank}').write_text(json.dumps(sys.argv[1:]))"
    )
    (tmp_path / "record.py").write_text(record)
    result = run(*script, controller, "--", "record.py", *AWKWARD, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    arrived = {
        file.name: json.loads(file.read_text(encoding="utf-8")) for file in tmp_path.glob("rank-*")
    }
    assert arrived == {"rank-0": AWKWARD, "rank-1": AWKWARD}
    assert not (tmp_path / "pwned").exists()

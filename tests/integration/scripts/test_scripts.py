"""The scripts: commands, arguments, errors in one line, and real trainings."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.launching import AWKWARD, LOCALHOST, PROGRAMS, PROJECT, PYTHON, SCRIPTS, dry_run, program, run

pytestmark = pytest.mark.integration


def test_the_command_of_a_local_training(tmp_path: Path) -> None:
    """Words after -- follow `hvd-train train`, --mpi replaces --gloo, and nothing runs."""
    words = dry_run("train_local.sh", "-n", "3", "--", "digits", "--epochs", "5", cwd=tmp_path)
    assert words == ["horovodrun", "-np", "3", "--gloo", "hvd-train", "train", "digits", "--epochs", "5"]
    for script in (["train_local.sh"], ["train_hostfile.sh", LOCALHOST]):
        words = dry_run(*script, "--mpi", cwd=tmp_path)
        assert "--mpi" in words and "--gloo" not in words
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("devices", "num_ranks"), [("0,1,2", 3), ("0,-1,1", 1), ("GPU-1a,GPU-2b", 2)])
def test_one_rank_per_visible_gpu(devices: str, num_ranks: int, tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES is read as CUDA reads it: it ends before a -1."""
    words = dry_run("train_local.sh", cwd=tmp_path, CUDA_VISIBLE_DEVICES=devices)
    assert words[:3] == ["horovodrun", "-np", str(num_ranks)]


def test_one_rank_per_gpu_that_the_driver_lists(tmp_path: Path) -> None:
    """Without CUDA_VISIBLE_DEVICES, the GPUs that nvidia-smi lists count; MIG parts do not."""
    lines = ["GPU 0: H100 (UUID: GPU-1)", "  MIG 1g.10gb Device 0: (UUID: MIG-1)", "GPU 1: H100 (UUID: GPU-2)"]
    driver = program(tmp_path / "nvidia-smi", f"printf '%s\\n' {shlex.join(lines)}")
    path = f"{driver.parent}:{PROGRAMS}:{os.environ['PATH']}"
    command = ["env", "-u", "CUDA_VISIBLE_DEVICES", f"PATH={path}", str(SCRIPTS / "train_local.sh"), "--dry-run"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=150)
    assert shlex.split(result.stdout)[:3] == ["horovodrun", "-np", "2"]


@pytest.mark.parametrize(("cores", "num_ranks"), [(1, 1), (64, 2)])
def test_without_a_gpu_two_ranks_and_no_more_than_cores(cores: int, num_ranks: int, tmp_path: Path) -> None:
    """OMP_NUM_THREADS does not count."""
    pretended = program(tmp_path / "nproc", f'echo "${{OMP_NUM_THREADS:-{cores}}}"')
    path = f"{pretended.parent}:{PROGRAMS}:{os.environ['PATH']}"
    words = dry_run("train_local.sh", cwd=tmp_path, PATH=path, OMP_NUM_THREADS="7")
    assert words[:3] == ["horovodrun", "-np", str(num_ranks)]


def test_hostfile_slots_are_the_ranks(tmp_path: Path) -> None:
    hosts = tmp_path / "my hosts"
    text = "a slots=4\nb.example slots=3 max_slots=8\n10.0.0.1:08\r\n\nc # one slot\n# d slots=9\ne slots=1"
    hosts.write_text(text, encoding="utf-8")
    words = dry_run("train_hostfile.sh", hosts, "--", "digits", cwd=tmp_path)
    assert words == ["horovodrun", "-np", "17", "--hostfile", str(hosts), "--gloo", "hvd-train", "train", "digits"]


def test_own_environment_is_found_from_a_path_with_blanks(tmp_path: Path, system_only: str) -> None:
    """If horovodrun is not on the PATH, the clone's own .venv is used, even through a link."""
    clone = tmp_path / "my clone's folder"
    shutil.copytree(SCRIPTS, clone / "horovodrun_scripts")
    program(clone / ".venv" / "bin" / "hvd-train", 'for word in "$@"; do echo "<$word>"; done')
    program(clone / ".venv" / "bin" / "horovodrun", 'shift 3; "$@"')
    link = tmp_path / "train"
    link.symlink_to(clone / "horovodrun_scripts" / "train_local.sh")
    real = run(link, "--", "a b", cwd=tmp_path, PATH=system_only)
    assert (real.returncode, real.stdout, real.stderr) == (0, "<train>\n<a b>\n", "")
    printed = run(link, "--dry-run", "--", "a b", cwd=tmp_path, PATH=system_only).stdout
    typed = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=False, timeout=150)
    assert (typed.returncode, typed.stdout, typed.stderr) == (0, "<train>\n<a b>\n", "")


def test_a_missing_program_is_one_line(tmp_path: Path, system_only: str) -> None:
    """A clone that was not set up prints one line that names what is missing and what to type."""
    clone = tmp_path / "clone"
    shutil.copytree(SCRIPTS, clone / "horovodrun_scripts")
    program(clone / ".venv" / "bin" / "horovodrun", "exit 9")
    result = run(clone / "horovodrun_scripts" / "train_local.sh", cwd=tmp_path, PATH=system_only)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "there is no hvd-train " in result.stderr
    assert f"make -C {clone} " in result.stderr


def test_help_is_the_comment_at_the_top(tmp_path: Path) -> None:
    result = run("train_hostfile.sh", "--help", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert all(words in result.stdout for words in ("train_hostfile.sh ", "--dry-run", "minute"))
    assert "set -euo pipefail" not in result.stdout


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
    ("line", "says"),
    [
        ("train_local.sh digits", "unknown argument 'digits'"),
        ("train_local.sh -n 0", "-n takes a number from 1, not '0'"),
        ("train_hostfile.sh", "which host file?"),
        ("train_hostfile.sh nowhere", "there is no host file nowhere"),
        ("train_hostfile.sh bad digits", "unknown argument 'digits'; what is for hvd-train train goes after --"),
        ("train_hostfile.sh bad", 'bad, line 2: "b slots=two" is not of the form "NAME slots=N"'),
        ("train_hostfile.sh empty", "empty has no slots"),
        ("train_mpirun.sh option", 'option, line 2: "-G slots=1" is not of the form "NAME slots=N"'),
        ("train_hostfile.sh empty --env A=hunter2", "--env takes the name of a variable, whose value is in"),
        ("train_elastic.sh --hosts nowhere", "--hosts: there is no host file 'nowhere'"),
        ("train_elastic.sh --min-np none", "--min-np takes a number from 1, not 'none'"),
        ("train_elastic.sh --min-np 4 --max-np 2", "--max-np 2 is less than --min-np 4"),
        ("train_elastic.sh --env NOT_SET", "--env NOT_SET: there is no such variable in the environment"),
    ],
)
def test_bad_input_is_one_line(line: str, says: str, tmp_path: Path) -> None:
    """Wrong input is one line on stderr that begins with the script's name, and exit code 2."""
    (tmp_path / "bad").write_text("a slots=1\nb slots=two\n", encoding="utf-8")
    (tmp_path / "option").write_text("a slots=1\n-G slots=1\n", encoding="utf-8")
    (tmp_path / "empty").write_text("# no hosts yet\n", encoding="utf-8")
    result = run(*line.split(), cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"{line.split()[0]}: {says}")
    assert "hunter2" not in result.stderr


@pytest.mark.parametrize(
    ("script", "controller"),
    [(["train_local.sh", "-n", "2"], "--gloo"), (["train_hostfile.sh", LOCALHOST], "--mpi")],
    ids=["local gloo", "hostfile mpi"],
)
def test_arguments_arrive_as_typed(script: list[str | Path], controller: str, tmp_path: Path) -> None:
    """Blanks, quotes, `;`, `$()` and line breaks reach every rank unchanged, over Gloo and MPI."""
    record = (
        "import json, os, pathlib, sys\n"
        "rank = os.environ.get('HOROVOD_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        "pathlib.Path(f'rank-{rank}').write_text(json.dumps(sys.argv[1:]))"
    )
    recorder = program(tmp_path / "stand in" / "hvd-train", f'exec {PYTHON} -c {shlex.quote(record)} "$@"')
    path = f"{recorder.parent}:{PROGRAMS}:{os.environ['PATH']}"
    result = run(*script, controller, "--", *AWKWARD, cwd=tmp_path, PATH=path)
    assert result.returncode == 0, result.stderr
    arrived = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in tmp_path.glob("rank-*")}
    assert arrived == {"rank-0": ["train", *AWKWARD], "rank-1": ["train", *AWKWARD]}
    assert not (tmp_path / "pwned").exists()

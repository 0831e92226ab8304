"""The scripts of horovodrun_scripts/: the commands they print, their errors, and real trainings with them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = PROJECT / "horovodrun_scripts"
LOCALHOST = PROJECT / "hostfiles" / "localhost"
PROGRAMS = Path(sys.executable).parent  # of the environment that the tests run in
AWKWARD = ["two words", "", "it's", 'a "b"', "; touch pwned", "$(touch pwned)", "`touch pwned`", "$HOME", "*"]
AWKWARD += [r"a\b", "line\nbreak", "--", "-np", "é"]
PYTHON = shlex.quote(sys.executable)  # a clone may lie in a path with a blank, which no #! line can name

pytestmark = pytest.mark.integration


def run(
    script: str | Path, *arguments: str | Path, cwd: Path, timeout_s: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as a user does, in a folder, and return what came of it; no process stays."""
    path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [str(SCRIPTS / script), *map(str, arguments)]
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def dry_run(script: str | Path, *arguments: str | Path, cwd: Path, **environment: str) -> list[str]:
    """Return the words of the one line that --dry-run prints."""
    result = run(script, "--dry-run", *arguments, cwd=cwd, timeout_s=60, **environment)
    assert (result.returncode, result.stderr) == (0, "")
    return shlex.split(result.stdout)


def program(path: Path, text: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def system_only(tmp_path: Path) -> str:
    """Return a PATH with the system's tools and without horovodrun."""
    folder = tmp_path / "system only"
    folder.mkdir()
    for name in ("bash", "dirname", "env", "grep", "nproc", "readlink", "sed", "tr"):
        found = shutil.which(name)
        assert found, f"this machine has no {name}"
        (folder / name).symlink_to(found)
    return str(folder)


# ------------------------------------------------------------------------------------------------ the dry run


def test_local_dry_run_prints_the_command(tmp_path: Path) -> None:
    """train_local.sh puts the words after -- behind `hvd-train train`, and runs nothing with --dry-run."""
    words = dry_run("train_local.sh", "-n", "3", "--", "digits", "--epochs", "5", cwd=tmp_path)
    assert words == ["horovodrun", "-np", "3", "--gloo", "hvd-train", "train", "digits", "--epochs", "5"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", [["train_local.sh"], ["train_hostfile.sh", LOCALHOST]])
def test_mpi_is_handed_on(script: list[str | Path], tmp_path: Path) -> None:
    """--mpi chooses MPI in place of Gloo."""
    words = dry_run(*script, "--mpi", cwd=tmp_path)
    assert "--mpi" in words
    assert "--gloo" not in words


@pytest.mark.parametrize(("devices", "num_ranks"), [("0,1,2", 3), ("3", 1), ("0,-1,1", 1), ("GPU-1a,GPU-2b", 2)])
def test_one_rank_per_visible_gpu(devices: str, num_ranks: int, tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES gives the number of GPUs as CUDA reads it: none from a -1 on."""
    words = dry_run("train_local.sh", cwd=tmp_path, CUDA_VISIBLE_DEVICES=devices)
    assert words[:3] == ["horovodrun", "-np", str(num_ranks)]


def test_one_rank_per_gpu_that_the_driver_lists(tmp_path: Path) -> None:
    """Without CUDA_VISIBLE_DEVICES the GPUs of the driver's list count, and the parts of a divided GPU do not."""
    lines = [
        "GPU 0: NVIDIA H100 (UUID: GPU-1)",
        "  MIG 1g.10gb Device 0: (UUID: MIG-1)",
        "GPU 1: NVIDIA H100 (UUID: GPU-2)",
    ]
    driver = program(tmp_path / "nvidia-smi", f"printf '%s\\n' {shlex.join(lines)}")
    path = f"{driver.parent}:{PROGRAMS}:{os.environ['PATH']}"
    unset = ["env", "-u", "CUDA_VISIBLE_DEVICES", f"PATH={path}"]
    command = [*unset, str(SCRIPTS / "train_local.sh"), "--dry-run"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert shlex.split(result.stdout)[:3] == ["horovodrun", "-np", "2"]


@pytest.mark.parametrize(("cores", "num_ranks"), [(1, 1), (2, 2), (64, 2)])
def test_without_a_gpu_two_ranks_and_no_more_than_cores(cores: int, num_ranks: int, tmp_path: Path) -> None:
    """A machine without a GPU gets 2 ranks, or 1 on a single core; OMP_NUM_THREADS does not count."""
    pretended = program(tmp_path / "nproc", f'echo "${{OMP_NUM_THREADS:-{cores}}}"')
    path = f"{pretended.parent}:{PROGRAMS}:{os.environ['PATH']}"
    words = dry_run("train_local.sh", cwd=tmp_path, PATH=path, OMP_NUM_THREADS="7")
    assert words[:3] == ["horovodrun", "-np", str(num_ranks)]


def test_hostfile_slots_are_the_ranks(tmp_path: Path) -> None:
    """train_hostfile.sh starts as many ranks as all hosts have slots together."""
    hosts = tmp_path / "my hosts"
    hosts.write_text(
        "a slots=4\nb.example slots=3 max_slots=8\n10.0.0.1:08\r\n\nc # one slot\n# d slots=9\ne slots=1",
        encoding="utf-8",
    )
    words = dry_run("train_hostfile.sh", hosts, "--", "digits", cwd=tmp_path)
    assert words[:5] == ["horovodrun", "-np", "17", "--hostfile", str(hosts)]
    assert words[5:] == ["--gloo", "hvd-train", "train", "digits"]


VERSIONS = {
    "4": "mpirun (Open MPI) 4.1.8",
    "5": "mpirun (Open MPI) 5.0.9",
    "mpich": "HYDRA build details:\n    Version: 4.3.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.17",
}


@pytest.mark.parametrize("kind", VERSIONS)
def test_each_mpirun_gets_its_own_flags(kind: str, tmp_path: Path, system_only: str) -> None:
    """Each mpirun gets hosts, slots, needed variables, no binding to cores, and an ssh that never prompts."""
    folder = tmp_path / "programs"
    for name in ("horovodrun", "hvd-train"):
        program(folder / name, "exit 9")
    program(folder / "mpirun", f"printf '%s\\n' {shlex.quote(VERSIONS[kind])}")
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=4\nb:2\n", encoding="utf-8")
    environment = {
        "PATH": f"{folder}:{system_only}:{os.environ['PATH']}",
        "NCCL_DEBUG": "INFO",
        "MPIRUN_FLAGS": "--tag x",
        **dict.fromkeys(("WANTED", "AWS_SECRET_ACCESS_KEY"), "hunter2"),
    }
    arguments = [hosts, "--env", "WANTED", "--", "digits", "--epochs", "5"]
    words = dry_run("train_mpirun.sh", *arguments, cwd=tmp_path, **environment)
    assert words[:6] == ["HVD_TRAIN_ENV=WANTED", "mpirun", "-np", "6", "--tag", "x"]
    assert words[-5:] == [str(folder / "hvd-train"), "train", "digits", "--epochs", "5"]
    line = " ".join(words)
    if kind in ("4", "5"):
        assert "-x PATH" in line
        assert "-x NCCL_DEBUG" in line
        assert "-x WANTED" in line
        assert "--bind-to none --map-by slot" in line
        assert "--host a:4,b:2" in line
        assert ("--mca plm_rsh_args -o BatchMode=yes" in line) == (kind == "4")
        assert ("--prtemca plm_ssh_args -o BatchMode=yes" in line) == (kind == "5")
    else:
        assert "-bind-to none -hosts a:4,b:2 -genvlist" in line
        assert {"PATH", "NCCL_DEBUG", "WANTED"} <= set(words[words.index("-genvlist") + 1].split(","))
    assert "AWS_SECRET_ACCESS_KEY" not in line
    assert "hunter2" not in line


def test_an_mpirun_that_nobody_knows(tmp_path: Path, system_only: str) -> None:
    """An unknown mpirun is refused, with its version text."""
    folder = tmp_path / "programs"
    for name, text in (("horovodrun", "exit 9"), ("hvd-train", "exit 9"), ("mpirun", "echo mpirun of the moon 7")):
        program(folder / name, text)
    path = f"{folder}:{system_only}:{os.environ['PATH']}"
    result = run("train_mpirun.sh", LOCALHOST, cwd=tmp_path, PATH=path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "train_mpirun.sh: this mpirun is neither Open MPI's nor MPICH's: mpirun of the moon 7\n"


def test_apptainer(tmp_path: Path, system_only: str) -> None:
    """One machine gets one container with horovodrun; a Slurm allocation gets srun with a container for each task."""
    folder, image = tmp_path / "programs", tmp_path / "an image.sif"
    program(folder / "apptainer", "exit 9")
    image.touch()
    path = f"{folder}:{system_only}"
    inside = ["apptainer", "exec", "--bind", "/scratch", str(image)]
    words = dry_run(
        "train_apptainer.sh", image, "--bind", "/scratch", "-n", "3", "--", "digits", cwd=tmp_path, PATH=path
    )
    assert words == [*inside, "horovodrun", "-np", "3", "--gloo", "hvd-train", "train", "digits"]
    words = dry_run(
        "train_apptainer.sh", image, "--bind", "/scratch", "--", "digits", cwd=tmp_path, PATH=path, SLURM_NTASKS="8"
    )
    assert words == ["srun", *inside, "hvd-train", "train", "digits"]
    words = dry_run("train_apptainer.sh", image, cwd=tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="0,1")
    assert words[:6] == ["apptainer", "exec", "--nv", str(image), "horovodrun", "-np"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which image?"),
        (["none.sif"], "there is no image none.sif"),
        (["-n", "0"], "takes a number of ranks from 1, not '0'"),
        (["here.sif"], "there is neither apptainer nor singularity on the PATH"),
    ],
)
def test_apptainer_that_cannot_start(arguments: list[str], message: str, tmp_path: Path, system_only: str) -> None:
    """Wrong arguments, a missing image or a missing program are one line with exit code 2."""
    (tmp_path / "here.sif").touch()
    result = run("train_apptainer.sh", *arguments, cwd=tmp_path, PATH=system_only)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.fixture
def containers(tmp_path: Path) -> tuple[dict[str, str], Callable[[], list[list[str]]]]:
    """Return an environment whose docker and ssh only write down their arguments, and a function that reads them."""
    folder, log = tmp_path / "bin", tmp_path / "docker.log"
    # What ssh does with its words: it joins them, and a shell takes them apart.
    program(folder / "ssh", 'while [ "$1" != -- ]; do shift; done; shift; export ON=$1; shift; exec sh -c "$*"')
    # A line is one write: two containers may be taken away at once, and print() writes the end of a line apart where
    # PYTHONUNBUFFERED is set.
    dump = (
        "import json, os, sys; os.write(1, (json.dumps([os.getenv('ON', 'here'), *sys.argv[1:]]) + chr(10)).encode())"
    )
    program(folder / "docker", f'[ "$1" != cp ] || cat > {tmp_path}/cp.tar; exec {PYTHON} -c "{dump}" "$@" >> {log}')
    program(folder / "nvidia-smi", "exit 9")

    def calls() -> list[list[str]]:
        return [json.loads(line) for line in log.read_text().splitlines()]

    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}, calls


def test_docker(containers: tuple[dict[str, str], Callable[[], list[list[str]]]], tmp_path: Path) -> None:
    """A container runs on each host, with the key in a file and the arguments as typed, and is removed at the end."""
    environment, read_calls = containers
    (tmp_path / "hosts").write_text("localhost slots=1\nother slots=2\n")
    options = ["--volume", "/data:/data:ro", "--runs", "my runs", "--env", "WANTED"]
    environment["WANTED"] = "hunter2"
    result = run("train_docker.sh", "hosts", *options, "--", *AWKWARD, cwd=tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    calls = read_calls()
    assert [(call[0], call[1]) for call in calls] == [
        *(("other", verb) for verb in ("create", "cp", "start", "exec")),
        *(("here", verb) for verb in ("create", "cp", "start")),
        *calls_of(calls[-2:]),
    ]
    assert sorted(calls_of(calls[-2:])) == [("here", "rm"), ("other", "rm")]
    assert calls[0][-2:] == ["hvd_train", "host"]
    launcher = calls[4]
    assert launcher[-len(AWKWARD) :] == AWKWARD
    assert launcher[launcher.index("hvd_train", launcher.index("--volume")) + 1 :][:5] == [
        "train_hostfile.sh", "/etc/hvd_train/ssh/hostfile", "--env", "WANTED", "--"
    ]  # fmt: skip
    assert [launcher[at + 1] for at, word in enumerate(launcher) if word == "--env"][1:] == ["WANTED", "WANTED"]
    assert "WANTED" not in calls[0]
    assert not any("hunter2" in word for call in calls for word in call)
    assert f"{tmp_path}/my runs:/home/trainer/runs" in launcher
    assert (tmp_path / "my runs").stat().st_mode & 0o022 == 0, "others can write there"
    copied = subprocess.run(["tar", "tvf", tmp_path / "cp.tar"], capture_output=True, text=True, check=True).stdout
    assert re.search(r"-rw------- 1000/1000 .* \./id_ed25519\n", copied)
    assert "PRIVATE KEY" not in result.stdout + result.stderr


def calls_of(calls: list[list[str]]) -> list[tuple[str, str]]:
    return [(call[0], call[1]) for call in calls]


def test_docker_dry_run(containers: tuple[dict[str, str], Callable[[], list[list[str]]]], tmp_path: Path) -> None:
    """Every command is printed as it can be typed, and none is run."""
    environment, _ = containers
    result = run(
        "train_docker.sh", PROJECT / "hostfiles/two_hosts", "--dry-run", "--elastic", cwd=tmp_path, **environment
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert not (tmp_path / "docker.log").exists()
    lines = result.stdout.splitlines()
    assert any(line.startswith("ssh -o BatchMode=yes -o ConnectTimeout=5 -- h1 docker\\ create") for line in lines)
    assert lines[-1].startswith("docker start --attach hvd_train-")
    assert any("train_elastic.sh --hosts /etc/hvd_train/ssh/hostfile --" in line for line in lines)


def test_mpi_is_told_where_it_is_on_other_hosts(tmp_path: Path, system_only: str) -> None:
    """An Open MPI beside horovodrun gets its own folder and orted on other hosts, unless the user has set them."""
    folder = tmp_path / "an environment" / "bin"
    for name in ("horovodrun", "hvd-train", "orted", "python"):
        program(folder / name, "exit 9")
    path = f"{folder}:{system_only}"
    chosen = {"PATH": path, "OMPI_MCA_orte_launch_agent": "my-orted", "OPAL_PREFIX": "/my/mpi"}
    prefix = f"OPAL_PREFIX={folder.parent}"
    expected = [
        "env",
        prefix,
        f"OMPI_MCA_orte_launch_agent='{folder}/orted'",
        "horovodrun",
    ]
    assert dry_run("train_hostfile.sh", LOCALHOST, "--mpi", cwd=tmp_path, PATH=path)[:4] == expected
    assert dry_run("train_hostfile.sh", LOCALHOST, "--mpi", cwd=tmp_path, **chosen)[0] == "horovodrun"
    assert dry_run("train_hostfile.sh", LOCALHOST, "--gloo", cwd=tmp_path, PATH=path)[0] == "horovodrun"


@pytest.mark.parametrize("name", [path.name for path in sorted((PROJECT / "hostfiles").iterdir())])
def test_hostfiles_are_bare(name: str, tmp_path: Path) -> None:
    """Every host file of the project has only lines `NAME slots=N`, which any Horovod can read."""
    text = (PROJECT / "hostfiles" / name).read_text(encoding="utf-8")
    slots = [line.partition(" slots=") for line in text.splitlines()]
    assert all(host.strip() == host != "" and number.isdigit() for host, _, number in slots)
    words = dry_run("train_hostfile.sh", PROJECT / "hostfiles" / name, cwd=tmp_path)
    assert words[:3] == ["horovodrun", "-np", str(sum(int(number) for _, _, number in slots))]


@pytest.mark.parametrize("script", ["train_local.sh", "train_hostfile.sh"])
def test_help_is_the_comment_at_the_top(script: str, tmp_path: Path) -> None:
    """--help shows what the script does, how it is typed and how long it takes, and none of its code."""
    result = run(script, "--help", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"{script} " in result.stdout
    assert "--dry-run" in result.stdout
    assert "minute" in result.stdout
    assert "set -euo pipefail" not in result.stdout


# ------------------------------------------------------------------------------------- where the programs are


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
    typed = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=False, timeout=60)
    assert (typed.returncode, typed.stdout, typed.stderr) == (0, "<train>\n<a b>\n", "")


@pytest.mark.parametrize("missing", ["horovodrun", "hvd-train"])
def test_a_missing_program_is_one_line(missing: str, tmp_path: Path, system_only: str) -> None:
    """A clone that was not set up prints one line that names what is missing and what to type."""
    clone = tmp_path / "clone"
    shutil.copytree(SCRIPTS, clone / "horovodrun_scripts")
    for name in {"horovodrun", "hvd-train"} - {missing}:
        program(clone / ".venv" / "bin" / name, "exit 9")
    result = run(clone / "horovodrun_scripts" / "train_local.sh", cwd=tmp_path, PATH=system_only)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert f"there is no {missing} " in result.stderr
    assert f"make -C {clone} " in result.stderr


# -------------------------------------------------------------------------------------------------- the image


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


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train_local.sh", "--epochs", "5"], "unknown argument '--epochs'"),
        (["train_local.sh", "digits"], "unknown argument 'digits'"),
        (["train_local.sh", "-n"], "-n takes a number of ranks from 1, not ''"),
        (["train_local.sh", "-n", "0"], "-n takes a number of ranks from 1, not '0'"),
        (["train_local.sh", "-n", "two"], "-n takes a number of ranks from 1, not 'two'"),
        (["train_hostfile.sh"], "which host file?"),
        (["train_hostfile.sh", "--", "digits"], "which host file?"),
        (["train_hostfile.sh", "nowhere"], "there is no host file nowhere"),
        (["train_hostfile.sh", "."], "there is no host file ."),
        (["train_hostfile.sh", "bad", "--nope"], "unknown argument '--nope'"),
        (["train_hostfile.sh", "bad", "digits"], "two host files, 'bad' and 'digits'"),
        (["train_hostfile.sh", "bad"], "bad, line 2: 'b slots=two' is not of the form 'NAME slots=N'"),
        (["train_hostfile.sh", "empty"], "empty has no slots"),
        (["train_hostfile.sh", "option"], "option, line 2: '-G slots=1' is not of the form 'NAME slots=N'"),
        (["train_mpirun.sh", "option"], "option, line 2: '-G slots=1' is not of the form 'NAME slots=N'"),
        (["train_docker.sh", "option"], "option, line 2: '-G slots=1' is not of the form 'NAME slots=N'"),
        (
            ["train_hostfile.sh", "empty", "--env"],
            "--env takes the name of a variable, whose value is in the environment",
        ),
        (["train_hostfile.sh", "empty", "--env", "A=hunter2"], "--env takes the name of a variable, whose value is in"),
        (["train_elastic.sh", "--env", "NOT_SET"], "--env NOT_SET: there is no such variable in the environment"),
        (
            ["train_mpirun.sh", "empty", "--env", "NOT_SET"],
            "--env NOT_SET: there is no such variable in the environment",
        ),
        (["train_docker.sh", "empty", "--env", "a-b"], "--env takes the name of a variable, whose value is in"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    """Wrong input is one line on stderr that begins with the script's name, and exit code 2."""
    (tmp_path / "bad").write_text("a slots=1\nb slots=two\n", encoding="utf-8")
    (tmp_path / "option").write_text("a slots=1\n-G slots=1\n", encoding="utf-8")
    (tmp_path / "empty").write_text("# no hosts yet\n", encoding="utf-8")
    result = run(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"{arguments[0]}: {says}")
    assert "hunter2" not in result.stderr


# ----------------------------------------------------------------------------------------- arguments as typed


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


def test_dry_run_can_be_typed(tmp_path: Path) -> None:
    """A shell reads the line that --dry-run prints as the same command, whatever the arguments hold."""
    result = run("train_local.sh", "--dry-run", "--", *AWKWARD, cwd=tmp_path)
    split = ["bash", "-c", f"printf '%s\\0' {result.stdout}"]
    shell = subprocess.run(split, capture_output=True, text=True, check=True, timeout=60)
    assert shell.stdout.split("\0")[:-1][-len(AWKWARD) :] == AWKWARD
    assert not (tmp_path / "pwned").exists()


# --------------------------------------------------------------------------------------------- real trainings


@pytest.mark.parametrize(
    ("script", "controller"),
    [(["train_local.sh"], "--gloo"), (["train_hostfile.sh", LOCALHOST], "--mpi")],
    ids=["local gloo", "hostfile mpi"],
)
def test_trains_the_digits(script: list[str | Path], controller: str, tmp_path: Path) -> None:
    """A real training of two epochs runs on as many ranks as the script says."""
    words = dry_run(*script, controller, cwd=tmp_path)
    num_ranks = int(words[words.index("-np") + 1])
    output = tmp_path / "my run"
    result = run(
        *script,
        controller,
        "--",
        "digits",
        "--epochs",
        "2",
        "--output-dir",
        output,
        cwd=tmp_path,
        timeout_s=240,
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    assert summary["world_size"] == num_ranks
    assert summary["top1"] > 0.5, "two epochs of the digits are far above chance, which is 0.1"


def test_a_failed_training_fails_the_script(tmp_path: Path) -> None:
    """A training that could not start is a failure of the script, too."""
    result = run("train_local.sh", "--", "no-such-recipe", cwd=tmp_path)
    assert result.returncode != 0


# -------------------------------------------------------------------------------------------------- the style


def test_shellcheck_has_nothing_to_say() -> None:
    """shellcheck has no complaint about any shell script of the project."""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not on this machine: apt install shellcheck")
    scripts = [
        *sorted(SCRIPTS.glob("*.sh")),
        *sorted(SCRIPTS.glob("*.sbatch")),
        *sorted((PROJECT / "packaging").glob("*.sh")),
    ]
    command = ["shellcheck", "--external-sources", *map(str, scripts)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("train_*.sh")), ids=lambda path: path.name)
def test_each_script_opens_with_what_it_does_and_ends_with_exec(path: Path) -> None:
    """Each script is executable, says first what it is for, and becomes the command that it starts.

    Only train_docker.sh stays, and removes its containers.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    assert os.access(path, os.X_OK)
    assert lines[0] == "#!/usr/bin/env bash"
    assert lines[1].startswith("# Train ")
    assert "set -euo pipefail" in lines
    last = [] if path.name == "train_docker.sh" else lines[-1:]
    assert [line for line in lines if line.startswith("exec ")] == last

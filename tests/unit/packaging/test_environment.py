"""The set-up: missing tools, digests of packages, and repeated steps."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import Program, write_program

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
TOOLS = (
    "awk bash cat cut dirname du env find flock grep head make mkdir mv realpath rm sed "
    "sleep stat tail touch"
)
TOOLS += " true uname"
ALL_STEPS = ["creating", "pinned", "horovod: built", "hvd_train"]
CUDA = "cuda-toolkit==13.2.2 ; python_version {} '3.11'\n"
LISTS = ("run", "build", "dev", "nvcc", "mpi")
Environ = dict[str, str]
BACKEND = """
import shutil
def build_editable(folder, config_settings=None, metadata_directory=None):
    return shutil.copy("../wheels/project-1-py3-none-any.whl", folder).rpartition("/")[2]
"""


def make_clone(folder: Path) -> Path:
    """Make a clone with the real set-up, three small wheels as package index, and a
    builder that only prints.
    """
    clone = folder / "a clone"
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    for name in ("harmless", "project", "wheel"):
        with zipfile.ZipFile(wheels / f"{name}-1-py3-none-any.whl", "w") as wheel:
            for file, text in {
                "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
                "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                "RECORD": "",
            }.items():
                wheel.writestr(f"{name}-1.dist-info/{file}", text)
    digest = hashlib.sha256((wheels / "harmless-1-py3-none-any.whl").read_bytes()).hexdigest()
    locks = [f"requirements/{folder}{name}.txt" for folder in ("", "locks/") for name in LISTS]
    for file, text in {
        **dict.fromkeys(locks, ""),
        "requirements/constraints.txt": CUDA.format("<") + CUDA.format(">="),
        "requirements/run.txt": "harmless\n",
        "requirements/locks/run.txt": f"harmless==1 --hash=sha256:{digest}\n",
        "packaging/build_horovod.py": "print('horovod: built')\n",
        "packaging/patches/C1.patch": "",
        "pyproject.toml": (
            '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n'
        ),
        "own.py": BACKEND,
    }.items():
        (clone / file).parent.mkdir(parents=True, exist_ok=True)
        (clone / file).write_text(text)
    for file in ("Makefile", "packaging/environment.sh"):
        shutil.copy(REPOSITORY / file, clone / file)
    return clone


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Environ:
    """Return the variables of a machine with only these tools, this
    Python and space on its disk.
    """
    folder = tmp_path_factory.mktemp("bin")
    for tool in TOOLS.split():
        (folder / tool).symlink_to(shutil.which(tool) or tool)
    for name in ("python3", PYTHON):
        (folder / name).symlink_to(Path(sys.executable).resolve())
    write_program(folder, "df", "echo; echo disk 9 9 99999 9 /")
    write_program(folder, "g++", 'case "$1" in --version) echo g++;; -dump*) echo 12.2.0;; esac')
    return {"PATH": str(folder), "HOME": str(folder), "PIP_NO_INDEX": "1"}


@pytest.fixture
def program(environ: Environ, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Return a function that puts a script before the tools of the machine."""
    monkeypatch.setitem(environ, "PATH", f"{tmp_path / 'bin'}{os.pathsep}{environ['PATH']}")
    return lambda name, body: write_program(tmp_path / "bin", name, body)


def make(clone: Path, environ: Environ) -> Any:
    return subprocess.run(
        ["make", "--no-print-directory", "env"],
        cwd=clone,
        env={**environ, "PIP_FIND_LINKS": str(clone.parent / "wheels")},
        capture_output=True,
        text=True,
        check=False,
    )


def steps(clone: Path, environ: Environ) -> list[str]:
    """Set up the clone, and return the steps that ran."""
    done = make(clone, environ)
    assert done.returncode == 0, done.stderr
    return [name for name in ALL_STEPS if name in done.stdout]


@pytest.fixture(scope="module")
def clone(environ: Environ, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone that is set up. All tests share it, because this takes seconds."""
    clone = make_clone(tmp_path_factory.mktemp("clones"))
    assert steps(clone, environ) == ALL_STEPS
    return clone


def test_a_step_is_repeated_when_its_inputs_change(clone: Path, environ: Environ) -> None:
    assert make(clone, environ).stdout == ""
    for file, repeated in {
        "requirements/run.txt": ALL_STEPS[1:],
        "packaging/patches/C1.patch": ["horovod: built"],
        "pyproject.toml": ["hvd_train"],
        "README.md": [],
    }.items():
        (clone / file).touch()
        assert steps(clone, environ) == repeated, file
    (clone / "packaging" / "patches" / "C1.patch").unlink()
    assert steps(clone, environ) == ["horovod: built"]


def test_an_interrupted_set_up_continues(clone: Path, environ: Environ) -> None:
    """A package that pip was installing has no RECORD yet; the set-up installs it again."""
    builder = clone / "packaging" / "build_horovod.py"
    works = builder.read_text()
    (record,) = clone.glob(".venv/lib/*/site-packages/harmless-1.dist-info/RECORD")
    record.unlink()
    (clone / "requirements" / "locks" / "run.txt").touch()
    builder.write_text("raise SystemExit('build_horovod: no')\n")
    failed = make(clone, environ)
    assert (failed.returncode, record.exists()) == (2, True)
    assert "(see above); the same command continues from here" in failed.stderr
    builder.write_text(works)
    assert steps(clone, environ) == ["horovod: built", "hvd_train"]


def test_only_locked_files_are_installed(clone: Path, environ: Environ) -> None:
    """The user can turn locks off."""
    lock = clone / "requirements" / "locks" / "run.txt"
    right = lock.read_text()
    (installed,) = clone.glob(".venv/lib/*/site-packages/harmless-1.dist-info")
    shutil.rmtree(installed)
    lock.write_text(f"harmless==1 --hash=sha256:{'0' * 64}\n")
    failed = make(clone, environ).stderr
    assert "installing the packages failed" in failed
    assert "HVD_TRAIN_HASHES=no make" in failed
    assert not installed.exists()
    assert "pinned" in steps(clone, {**environ, "HVD_TRAIN_HASHES": "no"})
    assert installed.exists()
    lock.write_text(right)


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """Return a clone without an environment."""
    return make_clone(tmp_path)


def other_python(program: Program, version: str, answers: str = "") -> None:
    """Put a python3 on the PATH that has these answers and can make no environment."""
    program(
        "python3",
        f'case "$*" in {answers} *"<"*) exit {int(version < "3.10")};; *"%d.%d"*) echo {version};; '
        f'*_base_exec*) echo $0;; *-m*) exit 1;; *) exec {sys.executable} "$@";; esac',
    )


def test_an_old_python_gets_a_message(fresh: Path, environ: Environ, program: Program) -> None:
    other_python(program, "3.09")
    assert f"the oldest supported: make env PYTHON={PYTHON}" in make(fresh, environ).stderr


def test_an_environment_of_another_folder_is_made_again(
    clone: Path, fresh: Path, environ: Environ, program: Program
) -> None:
    """Its commands hold the folder as an absolute path."""
    (fresh / ".venv").symlink_to(clone / ".venv")
    other_python(program, "3.12")
    assert "==> .venv is made again: it was made in another folder" in make(fresh, environ).stdout


def test_all_missing_parts_are_reported_at_once(
    fresh: Path, environ: Environ, program: Program
) -> None:
    other_python(program, "3.12", "*ensurepip*) exit 1;; *realpath*|*get_path*) echo /nowhere;;")
    program("df", "echo; echo disk 9 9 5000 9 /")
    program("g++", 'case "$1" in --version) echo g++;; -dump*) echo 10.2.1;; *) exit 1;; esac')
    program("nvidia-smi", 'echo "Driver Version: 550.54.15   CUDA Version: 12.4"')
    done = make(fresh, environ)
    assert done.returncode == 2
    for missing in (
        "apt install python3.12-venv",
        "g++ 10.2.1 is too old",
        "apt install python3.12-dev",
        "not enough disk space: 5000 MB free",
        "torch here is for CUDA 13: install a newer driver",
    ):
        assert missing in done.stderr

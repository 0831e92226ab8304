"""The new files of Horovod are in its tree, compile without a warning, and read mpirun's reports."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from horovod_build.cache import cache_folder, file_digest
from horovod_build.fetch import read_requirement, unpack
from horovod_build.machine import find_compiler
from horovod_build.patches import SOURCE_DIR, apply_patch, load_patches
from horovod_build.workshop import Workshop

SOURCES = sorted(
    path.relative_to(SOURCE_DIR)
    for path in SOURCE_DIR.rglob("*")
    if path.is_file() and not path.name.startswith(".") and path.parent.name != "__pycache__"
)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the release as the builder has fetched it, with all patches applied."""
    version, sha256 = read_requirement()
    archive = cache_folder() / "sources" / f"horovod-{version}.tar.gz"
    if not archive.exists() or file_digest(archive) != sha256:
        pytest.skip(f"the builder has not fetched {archive.name}: python packaging/build_horovod.py --force")
    folder = tmp_path_factory.mktemp("release")
    tree = unpack(archive, Workshop(folder, folder, folder / "log"))
    for patch in load_patches():
        apply_patch(patch, tree)
    return tree


def test_every_file_belongs_to_one_patch() -> None:
    """Every file of horovod_sources/ is added by exactly one patch."""
    assert sorted(Path(source.path) for patch in load_patches() for source in patch.adds) == SOURCES
    assert not any(patch.adds for patch in load_patches() if patch.needed_to_build)


def test_every_file_lands_in_the_tree(patched: Path) -> None:
    """The new files are in the patched release, byte for byte."""
    for path in SOURCES:
        assert (patched / path).read_bytes() == (SOURCE_DIR / path).read_bytes()


@pytest.mark.parametrize("path", [path for path in SOURCES if path.suffix == ".cc"], ids=str)
def test_new_code_compiles_without_a_warning(patched: Path, path: Path) -> None:
    """Our files compile with -Wall and -Wextra without a warning; those about Horovod's headers do not count."""
    command = [*shlex.split(find_compiler().command), "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    command += ["-isystem", str(patched / path.parent), "-isystem", str(patched / "third_party/gloo")]
    command.append(str(SOURCE_DIR / path))
    compiled = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert compiled.returncode == 0, compiled.stderr


def load(path: str) -> ModuleType:
    """Return the module in this file, whatever Horovod is installed."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, SOURCE_DIR / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (1, "ended with exit code 1"),
        (128, "ended with exit code 128"),
        (137, "was killed by signal 9 (SIGKILL)"),
        (255, "ended with exit code 255"),
    ],
)
def test_exit_code_in_words(exit_code: int, words: str) -> None:
    """Exit code 128 + N is the name of signal N, if there is such a signal."""
    error = load("horovod/runner/common/util/outcome.py").worker_failed("rank 1 on host h1", exit_code)
    assert str(error) == f"rank 1 on host h1 {words}; the other ranks were stopped"
    assert error.exit_code == exit_code


EDGE = "-" * 74 + "\n"
EXIT_BOX = f"""{EDGE}mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[12345,1],1]
  Exit code:    7
{EDGE}"""
SIGNAL_BOX = f"""{EDGE}mpirun noticed that process rank 1 with PID 0 on node h1 exited on
signal 9 (Killed).
{EDGE}"""
OTHER_BOX = f"{EDGE}A warning of Open MPI's.\n{EDGE}"


@pytest.mark.parametrize(
    ("printed", "failure", "left"),
    [
        (f"before\n{EXIT_BOX}after\n", (1, 7), "before\nafter\n"),
        (SIGNAL_BOX, (1, 137), ""),
        (EXIT_BOX + SIGNAL_BOX, (1, 7), ""),
        (OTHER_BOX, None, OTHER_BOX),
        (f"{EDGE}the output ends here\n", None, f"{EDGE}the output ends here\n"),
    ],
    ids=["exit code", "signal", "the first counts", "another box", "half a box"],
)
def test_mpirun_report_is_taken_out_of_the_output(printed: str, failure: tuple[int, int] | None, left: str) -> None:
    """Reports of mpirun about a failed worker are read and not shown; other output passes unchanged."""
    shown: list[str] = []
    report = load("horovod/runner/mpi_report.py").MpirunReport(shown.append)
    for line in printed.splitlines(keepends=True):
        report.feed(line)
    report.close()
    assert report.failure == failure
    assert "".join(shown) == left


@pytest.mark.parametrize("tag", ["", "[1,1]<stderr>:", "[1] ", "Mon Nov 23 20:35:12 2026[1,1]<stderr>:"])
def test_notices_of_the_guards_are_taken_out_of_the_output(tag: str) -> None:
    """What a rank printed before its end, without a line end, stays; the first rank that failed is the one at fault."""
    shown: list[str] = []
    report = load("horovod/runner/mpi_report.py").MpirunReport(shown.append)
    for line in (
        f"{tag}<horovodrun: rank 1 started 0>\n",
        f"{tag}<horovodrun: rank 0 started 0>\n",
        "mpirun: Forwarding signal 10 to job\n",
        f"{tag}no line end<horovodrun: rank 1 ended 7>\n",
        f"{tag}<horovodrun: rank 0 ended 143>\n",
        f"{tag}<horovodrun: rank 0 ended 143>\n",
        f"{tag}no notice\n",
    ):
        report.feed(line)
    assert (report.started, report.ended, report.failure) == ({0, 1}, {1: 7, 0: 143}, (1, 7))
    assert "".join(shown) == f"{tag}no line end\n{tag}no notice\n"

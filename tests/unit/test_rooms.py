"""The order of rooms: a module imports only from its own room and from those below it, and never in a circle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.support import rooms
from tests.support.rooms import PACKAGE, ROOMS

NO_TORCH = [
    "_version", "errors", "console", "numerals", "config", "config_file", "recipes", "flags", "plugin",
    "progress.order", "progress.schedule", "progress.clock", "progress.stop",
    "run_files.durable", "run_files.run_folder", "run_files.machine", "run_files.history",
    "profiling.trace",
    "report.charts", "report.confusion", "report.curves", "report.page", "report.report", "report.scaling",
    "report.watch",
    "bench.record", "bench.scaling",
    "cli",
]  # fmt: skip
NO_TORCH_ROOMS = ("settings", "launch", "elastic", "doctor", "commands")
HOROVOD = {"elastic.driver", "launch.client", "world.horovod_world"}


def test_every_module_is_in_a_room() -> None:
    """No module is forgotten, none of those that are named is missing, and every folder says what it is for."""
    assert [module for module in rooms.modules() if rooms.room_of(module) is None] == []
    named = {module for members in ROOMS.values() for module in members}
    assert named <= {module.split(".")[0] for module in rooms.modules()}
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")} - {module.split(".")[0] for module in named}
    assert folders == {room for room, members in ROOMS.items() if not members}
    assert all(rooms.purpose(room).endswith(".") for room in ROOMS)


def test_no_import_climbs_or_goes_in_a_circle() -> None:
    assert rooms.upward() == []
    assert rooms.circle() == []


def test_the_page_shows_the_rooms_that_the_code_has() -> None:
    """The table in docs/architecture.md is what `python -m tests.support.rooms --write` makes of the code."""
    assert rooms.page() == rooms.PAGE.read_text(encoding="utf-8")


def test_imports_of_other_libraries() -> None:
    """Each library is a declared dependency; only the world, the driver and the client of the store import Horovod."""
    imported = {module: rooms.imported_by(module) for module in rooms.modules()}
    assert {module for module, names in imported.items() if "horovod" in names} == HOROVOD
    called = {"PIL": "pillow", "sklearn": "scikit-learn", "typing_extensions": "typing-extensions", "yaml": "pyyaml"}
    declared = set(re.findall(r'"([a-z0-9-]+)(?:>=[0-9.]+)?"', (PACKAGE.parent / "pyproject.toml").read_text()))
    ours = {module.split(".")[0] for module in imported} | set(ROOMS) | {"hvd_train", "settings"}
    names = {target.split(".")[0] for targets in imported.values() for target in targets} - ours
    libraries = {called.get(name, name) for name in names - sys.stdlib_module_names - {"horovod"}}
    assert libraries - declared == set()


def test_the_builder_needs_only_the_standard_library() -> None:
    """It runs before anything is installed; its docstring names all its parts."""
    paths = {path.stem: path for path in (PACKAGE.parent / "packaging" / "horovod_build").glob("*.py")}
    table = (ast.get_docstring(ast.parse(paths.pop("__init__").read_text())) or "").splitlines()[2:]
    assert sorted(name for line in table for name in line.split("  ")[0].split(", ")) == sorted(paths)
    for path in paths.values():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[0] for name in found} <= {"horovod_build", *sys.stdlib_module_names}, path


def loaded_by(code: str) -> set[str]:
    program = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n{code}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_login_nodes_do_not_wait_for_torch() -> None:
    """Neither the lower rooms, the doctor, the report and the commands nor help and wrong flags import it."""
    light = [module for module in rooms.modules() if module.split(".")[0] in NO_TORCH_ROOMS and module not in HOROVOD]
    code = "".join(f"import hvd_train.{name}\n" for name in [*NO_TORCH, *light])
    commands = [["--help"], ["train", "--help"], ["train", "--epochs", "x"], ["report", "no"], ["watch", "no"]]
    for arguments in commands:
        code += f"try:\n    hvd_train.cli.run({arguments!r})\nexcept SystemExit:\n    pass\n"
    assert not loaded_by(code) & {"torch", "torchvision", "horovod", "sklearn", "tensorboard"}


@pytest.mark.slow
def test_the_default_recipe_needs_nothing_slow_beside_torch() -> None:
    """Neither scikit-learn nor torchvision nor torch's compiler: each takes about as long as torch."""
    code = "from hvd_train import cli\nassert cli.run(['train', '--epochs', '1', '--device', 'cpu']) == 0"
    assert not loaded_by(code) & {"sklearn", "torchvision", "torch._dynamo"}

"""The order of rooms: a module imports only from its own room and from those below it, and never in a circle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import rooms
from tests.support.rooms import PACKAGE, ROOMS

NO_TORCH = [
    "_version", "errors", "console", "numerals", "config", "config_file", "recipes", "flags", "plugin",
    "progress.order", "progress.schedule", "progress.clock", "progress.stop",
    "run_files.durable", "run_files.run_folder", "run_files.machine", "run_files.history",
    "profiling.trace",
    "report.charts", "report.confusion", "report.curves", "report.drawing", "report.overview", "report.page",
    "report.report", "report.scaling", "report.ticks", "report.timeline", "report.watch",
    "bench.batch_search", "bench.plots", "bench.record", "bench.scaling", "bench.scaling_job", "bench.scaling_table",
    "bench.tune", "network.peaks",
    "cli",
]  # fmt: skip
NO_TORCH_ROOMS = ("settings", "launch", "elastic", "doctor", "commands")
HOROVOD = {"launch.watched", "elastic.driver", "world.horovod_world"}


def test_every_module_is_in_a_room() -> None:
    """No module is forgotten, none of those that are named is missing, and every folder says what it is for."""
    assert [module for module in rooms.modules() if rooms.room_of(module) is None] == []
    named = {module for members in ROOMS.values() for module in members}
    assert named <= {module.split(".")[0] for module in rooms.modules()}
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")} - {module.split(".")[0] for module in named}
    assert folders == {room for room, members in ROOMS.items() if not members}
    assert all(rooms.purpose(room).endswith(".") for room in ROOMS)


@pytest.mark.parametrize("module", rooms.modules())
def test_every_module_has_its_tests_where_its_name_says(module: str) -> None:
    """tests/unit mirrors the rooms: hvd_train/ROOM/x.py has tests/unit/ROOM/test_x.py, or test_x_*.py."""
    room = str(rooms.room_of(module)).replace("the ", "").replace("front door", "commands")
    *folders, name = module.removeprefix(f"{room}.").split(".")
    folder = Path(__file__).parent.joinpath(room, *folders)
    assert [*folder.glob(f"test_{name.strip('_')}*.py")], f"{folder}/test_{name.strip('_')}.py is missing"


def test_no_import_climbs(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody needs to read a higher room to understand a lower one; the rooms and their arrows are printed."""
    assert rooms.upward() == []
    rooms.main()
    assert "0 of them upward; circle: none" in capsys.readouterr().out


def test_no_imports_in_a_circle() -> None:
    """Inside a room, too, the modules can be read one after another."""
    assert rooms.circle() == []


def test_the_page_shows_the_rooms_that_the_code_has() -> None:
    """The table in docs/architecture.md is what `python -m tests.support.rooms --write` makes of the code."""
    assert rooms.page() == rooms.PAGE.read_text(encoding="utf-8")


def test_one_module_on_each_side_imports_horovod() -> None:
    """What Horovod is asked for is asked in one place in the worker, and in one for each kind of launcher."""
    assert {module for module in rooms.modules() if "horovod" in rooms.imported_by(module)} == HOROVOD


def test_every_library_that_is_imported_is_a_declared_dependency() -> None:
    """What another library happens to bring along today may be gone tomorrow; Horovod comes from our own builder."""
    called = {
        "PIL": "pillow",
        "mlflow": "mlflow-skinny",
        "pynvml": "nvidia-ml-py",
        "sklearn": "scikit-learn",
        "typing_extensions": "typing-extensions",
        "yaml": "pyyaml",
    }
    declared = set(re.findall(r'"([a-z0-9-]+)(?:>=[0-9.]+)?"', (PACKAGE.parent / "pyproject.toml").read_text()))
    ours = {module.split(".")[0] for module in rooms.modules()} | set(ROOMS) | {"hvd_train", "settings"}
    imported = {target.split(".")[0] for module in rooms.modules() for target in rooms.imported_by(module)} - ours
    libraries = {called.get(name, name) for name in imported - sys.stdlib_module_names - {"horovod"}}
    assert libraries - declared == set()


@pytest.mark.parametrize("package", ["horovod_build", "environment_setup"])
def test_parts_of_packaging_import_only_from_those_before(package: str) -> None:
    """The package's docstring names all its modules in the order of imports; all else is the standard library's."""
    folder = Path(__file__).resolve().parents[2] / "packaging" / package
    trees = {path.stem: ast.parse(path.read_text()) for path in folder.glob("*.py")}
    table = (ast.get_docstring(trees.pop("__init__")) or "").splitlines()[2:]
    order = [name for line in table for name in line.split("  ")[0].split(", ")]
    assert sorted(order) == sorted(trees)
    for number, name in enumerate(order):
        nodes = list(ast.walk(trees[name]))
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        ours = {target for target in found if target.split(".")[0] == package}
        assert ours <= {f"{package}.{other}" for other in order[:number]}, name
        assert {target.split(".")[0] for target in found - ours} <= sys.stdlib_module_names, name


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has after this code."""
    program = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n{code}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.splitlines()[-1].split())


def test_what_login_nodes_need_starts_without_torch() -> None:
    """The lower rooms, the doctor, the report and the commands import neither torch nor Horovod."""
    light = [module for module in rooms.modules() if module.split(".")[0] in NO_TORCH_ROOMS and module not in HOROVOD]
    code = "".join(f"import hvd_train.{name}\n" for name in [*NO_TORCH, *light]) + "import hvd_train\n"
    assert not loaded_by(code) & {"torch", "torchvision", "horovod", "sklearn", "tensorboard"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["train", "--epochs", "x"], ["report", "no"], ["watch", "no"]]
)
def test_help_and_wrong_flags_do_not_wait_for_torch(arguments: list[str]) -> None:
    """Both are answered from the config alone."""
    code = f"from hvd_train import cli\ntry:\n    cli.run({arguments!r})\nexcept SystemExit:\n    pass"
    assert not loaded_by(code) & {"torch", "horovod"}


def test_the_default_recipe_needs_nothing_slow_beside_torch() -> None:
    """Neither scikit-learn nor torchvision nor torch's compiler: each takes about as long as torch."""
    code = "from hvd_train import cli\nassert cli.run(['train', '--epochs', '1', '--device', 'cpu']) == 0"
    assert not loaded_by(code) & {"sklearn", "torchvision", "torch._dynamo"}

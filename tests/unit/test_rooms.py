"""The package's modules: they import downward, never read a pickle of another
process, and have exact names.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import hvd_train
from tests.support import rooms
from tests.support.rooms import PACKAGE, ROOMS

NO_TORCH = [
    "_version",
    "errors",
    "console",
    "config",
    "config_file",
    "recipes",
    "flags",
    "plugin",
    "progress.order",
    "progress.schedule",
    "progress.clock",
    "progress.stop",
    "run_files.durable",
    "run_files.run_folder",
    "run_files.history",
    "report.page",
    "report.report",
    "report.watch",
    "bench.record",
    "bench.scaling",
    "cli",
]
NO_TORCH_ROOMS = ("launch", "elastic", "doctor", "commands")
# Functions of Horovod and mpi4py that send pickles (mpi4py's buffer functions begin with a
# capital), and modules that read pickles.
PICKLES = {
    *(
        "broadcast_object",
        "broadcast_object_fn",
        "allgather_object",
        "broadcast_optimizer_state",
        "run_func",
    ),
    *(
        "TorchState",
        "ObjectState",
        "read_data_from_kvstore",
        "put_data_into_kvstore",
        "loads_base64",
        "dumps_base64",
    ),
    *("bcast", "scatter", "allgather", "alltoall", "sendrecv", "isend", "irecv"),
    *("cloudpickle", "dill", "joblib", "marshal", "shelve"),
}
HARMLESS = {"pickle.UnpicklingError", "hvd.allgather"}  # the latter takes a tensor
HOROVOD = {"doctor.trial", "elastic.dispatcher", "elastic.driver"}
HOROVOD |= {"launch.client", "launch.start", "world.horovod_world"}


def test_every_module_is_in_a_room() -> None:
    """Each named module exists, and each folder states its purpose."""
    assert [module for module in rooms.modules() if rooms.room_of(module) is None] == []
    named = {module for members in ROOMS.values() for module in members}
    assert named <= {module.split(".")[0] for module in rooms.modules()}
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")} - {
        module.split(".")[0] for module in named
    }
    assert folders == {room for room, members in ROOMS.items() if not members}
    assert all(rooms.purpose(room).endswith(".") for room in ROOMS)


def test_imports_lead_downward_without_cycles() -> None:
    assert rooms.upward() == []
    assert rooms.circle() == []


def test_the_table_of_rooms_is_current() -> None:
    """`python -m tests.support.rooms --write` renews the table in docs/architecture.md."""
    assert rooms.page() == rooms.PAGE.read_text(encoding="utf-8")


def test_imports_of_other_libraries() -> None:
    """Each library is a declared dependency; six modules import Horovod."""
    imported = {module: rooms.imported_by(module) for module in rooms.modules()}
    assert {module for module, names in imported.items() if "horovod" in names} == HOROVOD
    called = {
        "PIL": "pillow",
        "sklearn": "scikit-learn",
        "typing_extensions": "typing-extensions",
        "yaml": "pyyaml",
    }
    declared = set(
        re.findall(r'"([a-z0-9-]+)(?:>=[0-9.]+)?"', (PACKAGE.parent / "pyproject.toml").read_text())
    )
    ours = {module.split(".")[0] for module in imported} | set(ROOMS) | {"hvd_train", "settings"}
    names = {target.split(".")[0] for targets in imported.values() for target in targets} - ours
    libraries = {called.get(name, name) for name in names - sys.stdlib_module_names - {"horovod"}}
    assert libraries - declared == set()


def test_the_builder_needs_only_the_standard_library() -> None:
    """It runs before any package is installed."""
    for path in (PACKAGE.parent / "packaging" / "horovod_build").glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        found = {
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        }
        found |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[0] for name in found} <= {
            "horovod_build",
            *sys.stdlib_module_names,
        }, path


def loaded_by(code: str) -> set[str]:
    program = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n{code}\n"
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_light_commands_do_not_import_torch() -> None:
    """Login nodes should not wait for torch."""
    light = [
        module
        for module in rooms.modules()
        if module.split(".")[0] in NO_TORCH_ROOMS and module not in HOROVOD
    ]
    code = "".join(f"import hvd_train.{name}\n" for name in [*NO_TORCH, *light])
    commands = [
        ["--help"],
        ["train", "--epochs", "x"],
        ["report", "no"],
        ["watch", "no"],
        ["completion", "bash"],
    ]
    commands += [[name, "--help"] for name in ("train", "config", "sweep")]
    for arguments in commands:
        code += f"try:\n    hvd_train.cli.run({arguments!r})\nexcept SystemExit:\n    pass\n"
    assert not loaded_by(code) & {"torch", "torchvision", "horovod", "sklearn", "tensorboard"}


def is_pickle(name: str) -> bool:
    reads = name.startswith(("pickle.", "torch.load")) or not PICKLES.isdisjoint(name.split("."))
    return reads and name not in HARMLESS


def unpickling(tree: ast.AST) -> Iterator[str]:
    """Yield the names in a module that read or send a pickle."""
    safe = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "weights_only=True" in map(ast.unparse, node.keywords)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in safe:
            yield from filter(is_pickle, [ast.unparse(node)])
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from filter(is_pickle, [f"{module}{alias.name}" for alias in node.names])


def test_no_module_reads_a_foreign_pickle() -> None:
    """Files and messages are JSON or loaded by torch with `weights_only`, which runs no code.

    Loader processes read what the process that started them has pickled.
    """
    paths = {*PACKAGE.rglob("*.py")} - {PACKAGE / "data" / "by_value.py"}
    sources = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    assert {
        path.name: found for path, tree in sources.items() if (found := list(unpickling(tree)))
    } == {}


def test_public_names_are_exact() -> None:
    """They are documented; any other name is an AttributeError."""
    assert sorted(hvd_train.__all__) == [
        "Config",
        "DataSet",
        "Each",
        "HvdTrainError",
        "Mean",
        "Result",
        "Scores",
        "Session",
        "Task",
        "Total",
        "UsageError",
        "__version__",
        "evaluate",
        "in_order",
        "parse_args",
        "recipes",
        "train",
    ]
    assert dir(hvd_train) == sorted(hvd_train.__all__)
    for name in hvd_train.__all__:
        assert name == "__version__" or getattr(hvd_train, name).__doc__, name
    with pytest.raises(AttributeError, match="module 'hvd_train' has no attribute 'trian'"):
        hvd_train.trian  # noqa: B018

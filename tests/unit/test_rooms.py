"""The package's modules: they import downward, never read a pickle of another
process, and have exact names.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import hvd_train

PACKAGE = Path(hvd_train.__file__).parent
TABLE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
# The rows of the table of rooms, from the bottom up: name, modules, what the reader finds.
ROWS = re.findall(r"^\| (\S+|the .+) \| (`.+`) \| (.+) \|$", TABLE, re.MULTILINE)
# Functions of Horovod and mpi4py that send pickles (mpi4py's buffer functions begin with a
# capital), and modules that read pickles.
PICKLES = {
    "broadcast_object",
    "broadcast_object_fn",
    "allgather_object",
    "broadcast_optimizer_state",
    "run_func",
    "TorchState",
    "ObjectState",
    "read_data_from_kvstore",
    "put_data_into_kvstore",
    "loads_base64",
    "dumps_base64",
    "bcast",
    "scatter",
    "allgather",
    "alltoall",
    "sendrecv",
    "isend",
    "irecv",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
}
HARMLESS = {"pickle.UnpicklingError", "hvd.allgather"}  # the latter takes a tensor
HOROVOD = {
    "doctor.trial",
    "elastic.dispatcher",
    "elastic.driver",
    "launch.client",
    "launch.start",
    "world.horovod_world",
}


def imported_by(path: Path) -> set[str]:
    """Return the names that a file imports, with their modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


# What each module imports, by its name without the package's.
IMPORTS = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): imported_by(path)
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}


def modules_of(room: str, listed: str) -> list[str]:
    """Return the modules of a row; a folder's modules have its name."""
    folder = room.strip("`").replace("/", ".") if room.startswith("`") else ""
    return [f"{folder}{name}" for name in re.findall(r"`(\w+)`", listed)]


def ours(module: str) -> set[str]:
    """Return the modules of the package that a module imports, or the package itself."""
    found = set[str]()
    for target in IMPORTS[module]:
        if target.split(".")[0] == "hvd_train":
            name = target.removeprefix("hvd_train.")
            found |= {name, name.rpartition(".")[0]} & IMPORTS.keys() or {"hvd_train"}
    return found


def test_every_module_is_in_a_room() -> None:
    """The table of docs/architecture.md names each once."""
    assert sorted(module for row in ROWS for module in modules_of(*row[:2])) == sorted(IMPORTS)


def test_imports_lead_downward_without_cycles() -> None:
    floor = {module: n for n, row in enumerate(ROWS) for module in modules_of(*row[:2])}
    floor["hvd_train"] = len(ROWS)
    assert [(a, b) for a in IMPORTS for b in ours(a) if floor[b] > floor[a]] == []
    TopologicalSorter({module: ours(module) for module in IMPORTS}).prepare()


def test_imports_of_other_libraries() -> None:
    """Each library is a declared dependency; six modules import Horovod."""
    imported = {module: {n.split(".")[0] for n in names} for module, names in IMPORTS.items()}
    assert {module for module, names in imported.items() if "horovod" in names} == HOROVOD
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    declared = {*re.findall(r'"([a-z0-9-]+)(?:>=[0-9.]+)?"', text)}
    known = {*sys.stdlib_module_names, "hvd_train", "horovod"}
    provided = packages_distributions()
    for name in set[str]().union(*imported.values()) - known:
        names = {one.lower().replace("_", "-") for one in provided.get(name, [name])}
        assert names & declared, name


def test_the_builder_needs_only_the_standard_library() -> None:
    """It runs before any package is installed."""
    for path in (PACKAGE.parent / "packaging" / "horovod_build").glob("*.py"):
        found = {name.split(".")[0] for name in imported_by(path)}
        assert found <= {"horovod_build", *sys.stdlib_module_names}, path


def test_light_commands_do_not_import_torch() -> None:
    """Login nodes should not wait for torch."""
    light = [modules_of(*row[:2]) for row in ROWS if "No torch." in row[2]]
    names = [name for row in light for name in row if name not in HOROVOD]
    code = "import sys; sys.path.insert(0, sys.argv[1])\n"
    code += "".join(f"import hvd_train.{name}\n" for name in [*names, "cli"])
    commands = [
        "--help",
        "train --epochs x",
        "report no",
        "watch no",
        "why no",
        "completion bash",
        "train --help",
        "config --help",
        "sweep --help",
    ]
    for line in commands:
        code += f"try:\n    hvd_train.cli.run({line.split()})\nexcept SystemExit:\n    pass\n"
    program = [sys.executable, "-c", f"{code}print(*sys.modules)", str(PACKAGE.parent)]
    printed = subprocess.check_output(program, stderr=subprocess.DEVNULL, text=True)
    loaded = set(printed.splitlines()[-1].split())
    assert not loaded & {"torch", "torchvision", "horovod", "sklearn", "tensorboard"}


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
    for path in paths:
        assert [*unpickling(ast.parse(path.read_text(encoding="utf-8")))] == [], path


def test_public_names_are_exact() -> None:
    """They are documented; any other name is an AttributeError."""
    names = "Config DataSet Each HvdTrainError Mean Result Scores Session Shards Task Tokens Total "
    names += "UsageError __version__ evaluate in_order parse_args recipes train"
    assert sorted(hvd_train.__all__) == names.split()
    assert dir(hvd_train) == sorted(hvd_train.__all__)
    for name in hvd_train.__all__:
        assert name == "__version__" or getattr(hvd_train, name).__doc__, name
    with pytest.raises(AttributeError, match="module 'hvd_train' has no attribute 'trian'"):
        hvd_train.trian  # noqa: B018

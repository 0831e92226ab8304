"""The direction of imports: a module imports only from rows above its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_train

PACKAGE = Path(hvd_train.__file__).parent
ROWS = [
    {"errors"},
    {"config"},
    {
        "recipes",
        "schedule",
        "order",
        "clock",
        "durable",
        "launch",
        "launcher_http",
        "horovodrun",
        "agent",
        "hosts",
        "slurm",
        "plugin",
        "stop",
        "time_slices",
        "flags",
        "members",
        "trace",
        "tuned",
    },
    {"roster", "roll_call", "rank_log", "charts", "tune"},
    {"world", "models", "optim", "data.augment", "data.pictures", "run_folder", "ledger", "remains", "supervisor"},
    {"page", "bench.plots"},
    {"history", "machine"},
    {"bench.record"},
    {"curves"},
    {"report", "watch"},
    {"data.dataset", "normalization", "device", "metrics", "pulse", "journal", "elastic_driver", "weights", "freeze"},
    {"data.transforms", "data.loader", "state", "horovod_world"},
    {"data.folder", "checkpoint", "step", "validate", "profile"},
    {"data.sources", "loop"},
    {"parts", "result"},
    {"training"},
    {"run", "show_data"},
    {"export", "sweep", "predictions", "bench.feed", "turn"},
    {"bench.allreduce", "bench.throughput", "bench.pipeline"},
    {"probe"},
    {"bench.scaling"},
    {"findings"},
    {"horovod_findings", "cluster_findings"},
    {"cluster"},
    {"doctor", "bench.command"},
    {"cli"},
]
NO_TORCH = [
    *ROWS[0],
    *ROWS[1],
    *ROWS[2],
    *ROWS[3],
    "run_folder",
    "page",
    "history",
    "machine",
    "bench.record",
    "curves",
    "report",
    "watch",
    "probe",
    "findings",
    "horovod_findings",
    "doctor",
    "bench.scaling",
    "bench.command",
    "cli",
]


def names() -> list[str]:
    """All modules of the package, dotted, without `__init__`."""
    paths = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")]
    return sorted(".".join(path.parts) for path in paths if path.name != "__init__")


def imported_by(name: str) -> set[str]:
    """What a module imports, anywhere in it: our modules without the package's name, others by their first name."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{name.replace('.', '/')}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = set()
    for target in found:
        if target.split(".")[0] != "hvd_train":
            ours.add(target.split(".")[0])
            continue
        parts = target.split(".")[1:]
        while parts and ".".join(parts) not in names():
            parts.pop()
        ours |= {".".join(parts)} - {""}
    return ours


def test_every_module_has_one_row() -> None:
    """A new module is given its place in the table."""
    assert sorted(name for row in ROWS for name in row) == names()


@pytest.mark.parametrize("name", names())
def test_a_module_imports_only_from_rows_above(name: str) -> None:
    """Nobody needs to read below to understand what is above."""
    row = next(number for number, row in enumerate(ROWS) if name in row)
    above = {other for upper in ROWS[:row] for other in upper}
    wrong = {target for target in imported_by(name) if target in names() and target not in above}
    assert not wrong, f"{name} (row {row}) imports {sorted(wrong)}"


def test_one_module_on_each_side_imports_horovod() -> None:
    """What Horovod is asked for is asked in one place in the worker, and in one at the launcher."""
    assert [name for name in names() if "horovod" in imported_by(name)] == ["elastic_driver", "horovod_world"]


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
    """The first rows, the doctor and the front door import neither torch nor Horovod."""
    code = "".join(f"import hvd_train.{name}\n" for name in NO_TORCH) + "import hvd_train\n"
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

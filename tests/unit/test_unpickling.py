"""The package never reads a pickle of another process: pickles can run code."""

import ast
from collections.abc import Iterator

from tests.support.rooms import PACKAGE

# Functions of Horovod and mpi4py that send pickles (mpi4py's buffer functions begin with a capital), and modules that
# read pickles.
PICKLES = {
    *("broadcast_object", "broadcast_object_fn", "allgather_object", "broadcast_optimizer_state", "run_func"),
    *("TorchState", "ObjectState", "read_data_from_kvstore", "put_data_into_kvstore", "loads_base64", "dumps_base64"),
    *("bcast", "scatter", "allgather", "alltoall", "sendrecv", "isend", "irecv"),
    *("cloudpickle", "dill", "joblib", "marshal", "shelve"),
}
HARMLESS = {"pickle.UnpicklingError", "hvd.allgather"}  # the latter takes a tensor


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
    """Files and messages are JSON or loaded by torch with `weights_only`, which runs no code."""
    sources = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path.name: found for path, tree in sources.items() if (found := list(unpickling(tree)))} == {}

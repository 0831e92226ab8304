"""Nothing in the package makes objects of a pickle that came from elsewhere: who writes one has its reader run code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support import rooms
from tests.support.rooms import PACKAGE

# What Horovod and mpi4py send between ranks as pickles (mpi4py's functions for buffers begin with a capital), and what
# reads pickles by itself.
PICKLES = {
    *("broadcast_object", "broadcast_object_fn", "allgather_object", "broadcast_optimizer_state", "run_func"),
    *("TorchState", "ObjectState", "read_data_from_kvstore", "put_data_into_kvstore", "loads_base64", "dumps_base64"),
    *("bcast", "scatter", "allgather", "alltoall", "sendrecv", "isend", "irecv"),
    *("cloudpickle", "dill", "joblib", "marshal", "shelve"),
}
OWN = "launch.own_pickle"
"""Reads what a program and its ranks have written in a folder of one account, and checks whose file it is."""
HARMLESS = {"pickle.UnpicklingError", "hvd.allgather"}  # the latter takes a tensor


def is_pickle(name: str) -> bool:
    """Return whether a name, such as `torch.load`, is one of what reads or sends pickles."""
    return name not in HARMLESS and (
        name.startswith(("pickle.", "torch.load")) or not PICKLES.isdisjoint(name.split("."))
    )


def unpickling(tree: ast.AST) -> Iterator[str]:
    """Yield what in a module reads or sends a pickle."""
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


@pytest.mark.parametrize("module", sorted({*rooms.modules()} - {OWN}))
def test_no_module_unpickles_what_comes_from_elsewhere(module: str) -> None:
    """Files and messages are JSON, or are read by torch's loader with `weights_only`, which runs no code."""
    source = (PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    assert list(unpickling(ast.parse(source))) == []


@pytest.mark.parametrize(
    "line",
    [
        "hvd.broadcast_object(state)", "from horovod.torch import allgather_object", "hvd.elastic.TorchState(model)",
        "import cloudpickle", "from cloudpickle import loads", "pickle.loads(text)", "comm.bcast(value)",
        "torch.load(file)", "torch.load(file, weights_only=False)", "from torch import load", "read = torch.load",
        "from pickle import loads",
    ],
)  # fmt: skip
def test_what_would_be_found(line: str) -> None:
    """Each way in which a pickle could come in."""
    assert list(unpickling(ast.parse(line))) != []

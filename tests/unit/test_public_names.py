"""The public names of `hvd_train`."""

import ast
from pathlib import Path

import pytest

import hvd_train


def test_public_names_are_exact() -> None:
    """They are documented and the same for type checkers; any other name is an AttributeError."""
    assert sorted(hvd_train.__all__) == [
        "Config", "DataSet", "HvdTrainError", "Result", "Scores", "UsageError", "__version__", "evaluate", "recipes",
        "train",
    ]  # fmt: skip
    assert dir(hvd_train) == sorted(hvd_train.__all__)
    for name in hvd_train.__all__:
        assert name == "__version__" or getattr(hvd_train, name).__doc__, name
    tree = ast.parse(Path(hvd_train.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(hvd_train.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="module 'hvd_train' has no attribute 'trian'"):
        hvd_train.trian  # noqa: B018

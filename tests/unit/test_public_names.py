"""What `hvd_train` itself offers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hvd_train


def test_all_is_exact() -> None:
    """The names are those in docs/own-optimizer.md; a name more is a decision."""
    assert sorted(hvd_train.__all__) == [
        "Config", "DataSet", "Figure", "HvdTrainError", "Result", "Scores", "Task", "UsageError", "__version__",
        "evaluate", "mean", "read_run", "recipes", "session", "start_ranks", "train",
    ]  # fmt: skip
    assert dir(hvd_train) == sorted(hvd_train.__all__)
    page = (Path(hvd_train.__file__).parents[1] / "docs" / "own-optimizer.md").read_text(encoding="utf-8")
    table = page.partition("## Names of the package")[2]
    assert [name for name in hvd_train.__all__ if name != "__version__" and f"`{name}" not in table] == []


@pytest.mark.parametrize("name", hvd_train.__all__)
def test_each_name_resolves_and_is_documented(name: str) -> None:
    """What is offered exists and says what it is."""
    value = getattr(hvd_train, name)
    assert name == "__version__" or value.__doc__


def test_type_checkers_see_the_same_names() -> None:
    """The imports for type checkers are the ones made when a name is used."""
    tree = ast.parse(Path(hvd_train.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(hvd_train.__all__) - {"__version__"}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    """As for any module."""
    with pytest.raises(AttributeError, match="module 'hvd_train' has no attribute 'trian'"):
        hvd_train.trian  # noqa: B018

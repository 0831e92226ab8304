"""Every recipe is complete, and a name that is none is answered with the nearest."""

from __future__ import annotations

import pytest

from hvd_train import recipes
from hvd_train.config_file import from_dict
from hvd_train.errors import UsageError


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_is_complete_and_bears_its_name(name: str) -> None:
    """A recipe is a config that can be written and read; its docstring says the command."""
    made = recipes.get(name)
    assert made.recipe == name
    assert from_dict(made.as_dict()) == made
    assert f"hvd-train train {name}" in (recipes.RECIPES[name].__doc__ or "")


def test_an_unknown_recipe_is_answered_with_the_nearest() -> None:
    """`digit` is `digits`; a name like no other gets the list."""
    with pytest.raises(UsageError, match="unknown recipe 'digit'; did you mean 'digits'"):
        recipes.get("digit")
    with pytest.raises(UsageError, match="unknown recipe 'xxxxxx'; known: "):
        recipes.get("xxxxxx")

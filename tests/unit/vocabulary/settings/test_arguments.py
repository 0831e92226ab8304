"""Arguments for the user's own code."""

from __future__ import annotations

import re

import pytest

from hvd_train.errors import UsageError
from hvd_train.settings.arguments import arguments_in


def test_values_have_the_types_that_yaml_gives_them() -> None:
    """Numbers in any notation, switches, texts, and lists of these."""
    typed = [
        "eps=1e-6",
        "rounds=3",
        "amsgrad=true",
        "mode=original",
        "limit=null",
        "foreach=None",
        "fused=none",
        "betas=[0.9, 1e-3]",
        "text=a=b",
    ]
    expected = {
        "eps": 1e-6,
        "rounds": 3,
        "amsgrad": True,
        "mode": "original",
        "limit": None,
        "foreach": None,
        "fused": None,
        "betas": (0.9, 1e-3),
    }
    found = arguments_in("optimizer-args", typed)
    assert found == {**expected, "text": "a=b"}
    assert [type(value) for value in found.values()] == [float, int, bool, str, *[type(None)] * 3, tuple, str]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eps", "--optimizer-args eps: it must be name=value, as in --optimizer-args eps=1e-6"),
        ("=3", "it must be name=value"),
        ("a-b=3", "it must be name=value"),
        ("betas=[1,", "the value cannot be read"),
        ("betas={a: 1}", "the value must be a number, a text, true, false, null or a list"),
        ("betas=[[1]]", "the value must be a number, a text, true, false, null or a list"),
        ("day=2026-01-01", "the value must be a number, a text, true, false, null or a list"),
    ],
)
def test_what_is_no_argument_is_one_line(text: str, message: str) -> None:
    """With what was typed, and what it must be."""
    with pytest.raises(UsageError, match=re.escape(message)) as refused:
        arguments_in("optimizer-args", [text])
    assert "\n" not in str(refused.value)

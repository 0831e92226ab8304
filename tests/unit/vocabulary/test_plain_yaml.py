"""YAML as plain values."""

from __future__ import annotations

import pytest

from hvd_train.plain_yaml import parse


def test_values_are_plain() -> None:
    """As YAML types them."""
    assert parse("{a: 1, b: [x, 2.5], c: true, d: null}") == {"a": 1, "b": ["x", 2.5], "c": True, "d": None}


@pytest.mark.parametrize(
    ("text", "reason"), [("[&a x, *a]", "aliases are refused"), ("[" * 100_000, "it nests too deep"), ("[1", "while")]
)
def test_what_is_no_plain_yaml_is_one_line(text: str, reason: str) -> None:
    """Also where a few bytes would stand for gigabytes."""
    with pytest.raises(ValueError, match=f"^{reason}") as refused:
        parse(text)
    assert "\n" not in str(refused.value)

"""Secrets in what libraries say."""

from __future__ import annotations

import pytest

from hvd_train.run_files.masked import masked, reason


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET http://me:pass/w@rd@host/api failed", "GET http://***@host/api failed"),
        ("s3://bucket/x?token=abc&part=1", "s3://bucket/x?token=***&part=1"),
        ("https://host/?X-Amz-Signature=abc", "https://host/?X-Amz-Signature=***"),
        ("nothing to hide at //host/path", "nothing to hide at //host/path"),
    ],
)
def test_no_password_of_an_address_is_shown(text: str, shown: str) -> None:
    """The rest of the text stays as it is."""
    assert masked(text) == shown


def test_no_key_of_the_environment_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a library shows it by itself."""
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert masked("the key 0123456789abcdef is refused") == "the key *** is refused"


def test_a_reason_is_one_line() -> None:
    """The first one, cut where it is long; an error that says nothing has its name."""
    assert reason(ValueError("first\nsecond")) == "first"
    assert reason(TimeoutError()) == "TimeoutError"
    assert len(reason(ValueError("x" * 1000))) < 250

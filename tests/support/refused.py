"""Refused settings and their messages."""

import re
from typing import Any

import pytest

from hvd_train import Config
from hvd_train.errors import UsageError


def assert_refused(changes: dict[str, Any], message: str) -> None:
    """Assert that these changes of the default config are refused in one line with the message."""
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        Config().replace(**changes)
    assert "\n" not in str(caught.value)

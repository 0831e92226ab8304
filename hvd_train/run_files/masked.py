"""Text without secrets: what a library says of an error may hold the password of an address, or a key."""

from __future__ import annotations

import os
import re

_IN_ADDRESS = re.compile(r"//\S*@")
_IN_QUERY = re.compile(r"([?&][^=\s&]*(?:key|token|secret|password|signature)[^=\s&]*=)[^&\s]+", re.IGNORECASE)
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL")
_SHORTEST = 6  # a value of fewer letters stands in any text
_LONGEST_REASON = 200


def masked(text: str) -> str:
    """Return text with *** in place of passwords in addresses and of what the environment holds as keys or tokens."""
    secrets = [value for name, value in os.environ.items() if _NAMES.search(name.upper()) and len(value) >= _SHORTEST]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return _IN_QUERY.sub(r"\1***", _IN_ADDRESS.sub("//***@", text))


def reason(error: Exception) -> str:
    """Return the first line of what an error says, without secrets and no longer than a line."""
    text = masked((str(error).strip() or type(error).__name__).splitlines()[0])
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "..."

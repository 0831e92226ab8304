"""The version of hvd_train, and a digest of its code, by which edited checkouts differ."""

import hashlib
from pathlib import Path

__version__ = "0.1.0"


def digest_of_code() -> str:
    """Return twelve hexadecimal digits that are the same for two packages only if
    every module is the same.
    """
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]

"""Hosts that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import hosts as cluster
from tests.support.hosts import Hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with cluster.hosts(tmp_path_factory.mktemp("hosts") / "cluster", 2, names=2) as found:
        yield found

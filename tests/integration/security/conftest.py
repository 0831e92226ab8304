"""Hosts that the tests of a module share."""

from tests.support.hosts import hosts_fixture

hosts = hosts_fixture(2, scope="module")

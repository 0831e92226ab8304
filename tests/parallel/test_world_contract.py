"""The contract of a world, on Horovod."""

from tests.support.contract import *  # noqa: F403  # the tests of the suite

"""The stand-in for a GPU, and commands that run on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_gpu import build
from tests.fake_gpu.launch import OnGpu


@pytest.fixture(scope="session")
def libraries() -> Path:
    """Return the folder of the stand-in's libraries, or skip the test."""
    try:
        return build.built()
    except build.NotHere as reason:
        pytest.skip(str(reason))


@pytest.fixture
def gpu(libraries: Path, tmp_path: Path) -> Iterator[OnGpu]:
    """Run commands on the stand-in, which must not see a mistake that the test did not read."""
    on_gpu = OnGpu(libraries, tmp_path)
    yield on_gpu
    assert not on_gpu.mistakes(), "the stand-in has seen mistakes"

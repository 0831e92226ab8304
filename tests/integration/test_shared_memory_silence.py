"""When a rank that shares memory counts as silent (patch C8): the new file of the patch alone, without Horovod."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "packaging/horovod_sources/horovod/common"
HEADERS = {
    "logging.h": "#include <iostream>\n#define LOG(...) while (false) std::cerr\n",
    "utils/env_parser.h": "inline bool GetBoolEnvOrDefault(const char *, bool value) { return value; }\n",
}
"""What stands for two headers of Horovod's."""


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program."""
    folder = tmp_path_factory.mktemp("silence")
    for name, text in HEADERS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("this plays a file of Horovod, built with g++: apt install g++")
    sources = [SOURCE / "shared_memory.cc", Path(__file__).with_name("patch_workers") / "c8_silence.cc"]
    command = [compiler, "-std=c++20", "-pthread", f"-I{SOURCE}", f"-I{folder}", *map(str, sources)]
    subprocess.run([*command, "-o", str(folder / "play")], check=True)
    return folder / "play"


@pytest.mark.parametrize(
    ("way", "told"),
    [("busy", "sum 3\n"), ("asleep", "a rank on this host is gone or silent (shared memory)\n")],
)
def test_a_rank_that_is_slow_is_not_silent(play: Path, way: str, told: str) -> None:
    """One that computes for three times the limit is waited for; one that sleeps is given up."""
    done = subprocess.run([play, way], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == told

"""What horovodrun prints of the standard output of mpirun: the report of rank 0 as it is, that of others with a tag."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from horovod_build.patches import SOURCE_DIR


@pytest.fixture(scope="module")
def mpi_report() -> ModuleType:
    """The module as it stands in this checkout, which may not be built yet."""
    spec = importlib.util.spec_from_file_location("mpi_report", SOURCE_DIR / "horovod" / "runner" / "mpi_report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PRINTED = b"[1,0]<stdout>:epoch 1[1,0]<stdout>:\n[1,1]<stdout>:a note\n[1,0]<stdout>:[1, 0] is [1,0]<st>\n[1,0]"
SHOWN = b"epoch 1\n[1,1]<stdout>:a note\n[1, 0] is [1,0]<st>\n[1,0]"


@pytest.mark.parametrize("size", [1, 3, 7, 14, 1000])
def test_the_tags_of_rank_0_are_taken_out(size: int, mpi_report: ModuleType) -> None:
    """However the pipe cuts them in pieces; what only looks like one stays, at the end as well."""
    untagged = mpi_report.Untagged()
    pieces = [PRINTED[at : at + size] for at in range(0, len(PRINTED), size)]
    assert b"".join(untagged.feed(piece) for piece in [*pieces, b""]) == SHOWN


def test_text_is_not_held_back(mpi_report: ModuleType) -> None:
    """But for what may be half a tag: a line, and a bar without a line's end, are shown as they come."""
    untagged = mpi_report.Untagged()
    assert untagged.feed(b"[1,0]<stdout>:epoch [##") == b"epoch [##"
    assert untagged.feed(b"#]\n[1,0]<stdo") == b"#]\n"
    assert untagged.feed(b"ut>:x") == b"x"

"""For which GPUs Horovod's kernels are compiled, and what is said where one is not among them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hvd_train.doctor import gpu_code
from hvd_train.doctor.horovod_findings import check_gpu_code
from tests.support.facts import BUILD, TORCH, agrees, installed

ARCHS = [75, 80, 86, 90, 100, 120]


@pytest.mark.parametrize(
    ("capability", "covered"),
    [(75, True), (89, True), (87, True), (103, True), (121, True), (130, True), (70, False), (72, False), (110, False)],
)
def test_code_runs_on_its_generation_and_ptx_on_newer_gpus(capability: int, covered: bool) -> None:
    """Code for 8.6 runs on 8.9, and the PTX of 12.0 on 13.0, but neither that of 10.0 nor of 12.0 on 11.0."""
    assert gpu_code.covers(ARCHS, capability) is covered


def test_a_gpu_without_code_is_told_with_what_to_type() -> None:
    """The list that is to be compiled holds that GPU beside those of before."""
    build = installed({**BUILD, "cuda_archs": ARCHS})
    (finding,) = check_gpu_code(build, {**TORCH, "capabilities": [90, 110, 110]})
    agrees(finding, "broken", "not for 11.0")
    assert "HOROVOD_BUILD_CUDA_CC_LIST=75,80,86,90,100,110,120 python packaging/build_horovod.py" in finding.todo
    (finding,) = check_gpu_code(build, {**TORCH, "capabilities": [90, 90]})
    agrees(finding, "ok", "here is 9.0")
    assert check_gpu_code(build, TORCH) == [], "there is no GPU"
    assert check_gpu_code(installed(), {**TORCH, "capabilities": [90]}) == [], "the build does not say"
    assert check_gpu_code(None, {**TORCH, "capabilities": [90]}) == []


@pytest.mark.parametrize(
    ("record", "archs"),
    [
        (json.dumps({"cuda_archs": [80, 90]}), [80, 90]),
        (json.dumps({"cuda_archs": None}), None),
        ("no json", None),
        (None, None),
    ],
)
def test_the_build_says_what_it_is_compiled_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str | None, archs: list[int] | None
) -> None:
    """Horovod is not imported for it; one that was built elsewhere says nothing."""
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    if record is not None:
        (package / gpu_code.BUILD_FILE).write_text(record)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert gpu_code.compiled_for() == archs

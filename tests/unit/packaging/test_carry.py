"""The files to carry to a machine without a network: what is among them, and what is wrong with a command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import carry
import pytest

MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
LOCK = Path(carry.ROOT / "requirements" / f"python{MINOR}" / "run.txt").read_text()


def plan(folder: Path, *arguments: str) -> list[carry.Step]:
    """Return the steps for this command line."""
    options = carry.parse_options(["--python", sys.executable, "--folder", str(folder / "files"), *arguments])
    return carry.steps(options, folder)


def test_only_what_is_missing_is_carried() -> None:
    """What is there in any spelling, what comes with torch, and what only MPI needs stay behind; digests come along."""
    missing = carry.missing_there(LOCK, "numpy==1.0\nTensorboard_Data.Server==0.1\nnot a line of pip\n")
    names = re.findall(r"^([^ ]+)==", missing, re.MULTILINE)
    assert {"tyro", "cffi", "cloudpickle", "rich"} <= set(names)
    assert not {"numpy", "tensorboard-data-server", "torch", "mpi4py", "triton", "nvidia-nccl-cu13"} & set(names)
    assert all(f"{name}==" in LOCK for name in names)
    assert len(names) <= missing.count("--hash=sha256:")


def test_the_dry_run_shows_every_step_and_does_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan has Horovod and NCCL for the GPU that is named, and leaves no file."""
    line = ["--python", sys.executable, "--folder", str(tmp_path / "files"), "--arch", "80", "--dry-run"]
    assert carry.main(line) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^carry: (\w+): .*: to do$", printed, re.MULTILINE) == [s.name for s in plan(tmp_path)]
    assert "code=sm_80" in printed
    assert not list(tmp_path.iterdir())
    (horovod,) = [step for step in plan(tmp_path, "--arch", "80") if step.name == "horovod"]
    assert dict(horovod.variables) == {"HOROVOD_BUILD_CUDA_CC_LIST": "80"}


def test_a_step_is_done_again_when_its_commands_change(tmp_path: Path) -> None:
    """What was built for one GPU is not taken for another; source, which may have changed, is packed each time."""
    for step in plan(tmp_path):
        (tmp_path / f"{step.name}.done").write_text(step.key)
    done = {step.name for step in plan(tmp_path) if carry.is_done(step, tmp_path)}
    assert done == {"python", "torch", "horovod", "nccl"}
    assert {step.name for step in plan(tmp_path, "--arch", "100") if carry.is_done(step, tmp_path)} == {
        "python",
        "torch",
    }


def test_a_step_that_fails_says_what_its_command_said(tmp_path: Path) -> None:
    """The error has the command and the end of its log, and the step does not count as done."""
    step = carry.Step("nccl", "NCCL", (("true",), ("sh", "-c", "echo no such nvcc; false")))
    with pytest.raises(carry.CarryError, match=r"(?s)^nccl: .*no such nvcc"):
        carry.do(step, tmp_path)
    assert not carry.is_done(step, tmp_path)


def test_files_that_are_too_many_name_the_heaviest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the error names what weighs most."""
    monkeypatch.setattr(carry, "MOST_BYTES", 3 << 20)
    (tmp_path / "light.whl").write_bytes(bytes(1 << 20))
    assert carry.check_size(tmp_path) == "1 files, 1.0 MiB: light.whl 1.0"
    (tmp_path / "heavy.whl").write_bytes(bytes(5 << 19))
    with pytest.raises(carry.CarryError, match=r"3\.5 MiB are more than 3: heavy\.whl 2\.5, light"):
        carry.check_size(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--python", "/no/python"], "there is no /no/python that runs"),
        (["--python", sys.executable, "--only", "sauce"], "there is no step 'sauce'"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is begun, and the exit code is 2."""
    assert carry.main([*arguments, "--folder", str(tmp_path / "files")]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert not list(tmp_path.iterdir())

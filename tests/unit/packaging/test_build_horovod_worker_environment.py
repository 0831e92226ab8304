"""Which variables ranks on other hosts get, and that they come through standard input alone."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from horovod.runner.common.util.outcome import JobFailedError
from horovod.runner.util import worker_environment

SCRIPT = Path(__file__).parents[3] / "horovodrun_scripts/_launch.sh"
NEEDED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "HOROVOD_RENDEZVOUS_KEY", "HVD_TRAIN_HOSTS"),
    *("NCCL_DEBUG", "OMP_NUM_THREADS", "https_proxy", "NO_PROXY", "CUDA_HOME", "TORCH_HOME", "LC_ALL", "UCX_TLS"),
    *("PYTORCH_CUDA_ALLOC_CONF", "OMPI_MCA_orte_launch_agent", "FI_PROVIDER", "TZ", "OPAL_PREFIX"),
)
PRIVATE = (
    *("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN", "SSH_AUTH_SOCK", "HOME", "USER", "MY_PATH", "PATH_TO_KEY"),
    *("PMIX_SERVER_URI", "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "CUDA_VISIBLE_DEVICES", "BASH_FUNC_x%%", "OMP_a.b"),
)


def test_what_training_needs_goes_to_other_hosts() -> None:
    """And nothing else, unless HVD_TRAIN_ENV names it."""
    variables = dict.fromkeys((*NEEDED, *PRIVATE), "value")
    assert set(worker_environment.for_other_hosts(variables)) == set(NEEDED)
    more = {**variables, "HVD_TRAIN_ENV": "HF_TOKEN, WANDB_API_KEY,,NOT_SET"}
    assert set(worker_environment.for_other_hosts(more)) - set(NEEDED) == {"HVD_TRAIN_ENV", "HF_TOKEN", "WANDB_API_KEY"}


def test_the_scripts_have_the_same_list() -> None:
    """Plain mpirun passes on what horovodrun does."""
    named = [name for name in (*NEEDED, *PRIVATE) if name.isidentifier()]
    listed = [*worker_environment._NAMES, *(f"{prefix}X" for prefix in worker_environment._PREFIXES), *named, "WANTED"]
    loop = f'source "{SCRIPT}"; for name; do if is_passed_on "$name"; then echo "$name"; fi; done'
    done = subprocess.run(
        ["bash", "-c", loop, "bash", *listed],
        env={**os.environ, "HVD_TRAIN_ENV": "OTHER,WANTED"},
        capture_output=True,
        text=True,
        check=True,
    )
    variables = {**dict.fromkeys(listed, "value"), "HVD_TRAIN_ENV": "OTHER,WANTED"}
    expected = set(worker_environment.for_other_hosts(variables)) - {"HVD_TRAIN_ENV"}
    assert set(done.stdout.split()) == expected
    case = SCRIPT.read_text().partition("is_passed_on() {")[2].partition("*) [[")[0]
    words = {word.rstrip("*)") for word in case.split() if word[0].isalpha() and word not in ("case", "in", "return")}
    assert words == {*worker_environment._NAMES, *worker_environment._PREFIXES}


@pytest.mark.parametrize("text", ["AWS_KEY=hunter2", "A B", "1ST", "A;hunter2"])
def test_a_value_in_the_place_of_a_name_is_one_line(text: str) -> None:
    """It is bad input, and what may be a secret is not shown."""
    with pytest.raises(JobFailedError, match="HVD_TRAIN_ENV takes names of variables") as caught:
        worker_environment.for_other_hosts({"HVD_TRAIN_ENV": f"GOOD,{text}"})
    assert caught.value.exit_code == 2
    assert "=" not in str(caught.value)


AWKWARD = {"A": "two\nlines\n", "B": 'it\'s "$HOME" `id` \\', "C": os.fsdecode(b"\xff\xfe"), "E": ""}
SHOW = "import os, sys; print(os.getcwd(), [os.environb.get(name) for name in (b'A', b'B', b'C', b'E')], "
SHOW += "repr(sys.stdin.read()))"


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_values_arrive_as_they_are(shell: str, tmp_path: Path) -> None:
    """In a folder with blanks, whatever bytes they hold; the command's own standard input is empty."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    command = f"exec env X=1 {shlex.join([sys.executable, '-c', SHOW])}"
    script, told = worker_environment.on_other_host(command, AWKWARD, str(folder))
    assert not any(value and value in script for value in AWKWARD.values())
    done = subprocess.run([shell, "-c", script], input=told, capture_output=True, check=True)
    values = [os.fsencode(value) for value in AWKWARD.values()]
    assert done.stdout.decode() == f"{folder} {values} ''\n"


def test_half_an_environment_runs_nothing(tmp_path: Path) -> None:
    """A rank without its number would train alone, and write into the run folder."""
    script, told = worker_environment.on_other_host("exec touch started", {"HOROVOD_RANK": "1"}, str(tmp_path))
    for end in range(len(told) - 2):
        subprocess.run(["sh", "-c", script], input=told[:end], capture_output=True, check=False)
    assert not list(tmp_path.iterdir())
    subprocess.run(["sh", "-c", script], input=told, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["started"]


def test_a_rank_here_inherits_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is given comes on top."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    found = worker_environment.for_this_host({"HOROVOD_RANK": "1"})
    assert (found["AWS_SECRET_ACCESS_KEY"], found["HOROVOD_RANK"]) == ("hunter2", "1")

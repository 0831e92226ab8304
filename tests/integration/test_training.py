"""Whole trainings under real launchers: successes, signals, faults and wrong input."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from hvd_train import cli, evaluate
from tests.support import jpegs
from tests.support.hosts import OBEDIENT, OWN_LOOP
from tests.support.launching import (
    HVD_TRAIN,
    PROJECT,
    PYTHON,
    json_lines,
    launch_line,
    output_of,
    ranks_of,
    records,
    started,
    wait_for,
)
from tests.support.on_demand import pace
from tests.support.runs import Weights, equal

pytestmark = pytest.mark.integration
slow = pytest.mark.slow

OF_TESTS = {"PYTHONPATH": str(PROJECT)}
STEPS = 3 * 23  # 1,437 images, 64 a step
# Each takes a rank a second or more to import.
TRAIN = """
import sys
from hvd_train.cli import main
try:
    main()
finally:
    print("imported", {*sys.modules} & {"torch._dynamo", "sympy", "torchvision"})
"""
RANK = {"gloo": "HOROVOD_RANK"} | dict.fromkeys(("mpi", "mpirun", "launch"), "OMPI_COMM_WORLD_RANK")


@pytest.mark.parametrize(
    "launcher", ["gloo", pytest.param("mpi", marks=slow), pytest.param("mpirun", marks=slow)]
)
def test_digits_reach_98_percent_on_two_ranks(launcher: str, tmp_path: Path) -> None:
    """The default recipe trains to at least 98% top-1 through every launcher, imports no
    slow library, and leaves a whole run folder.
    """
    command = launch_line(launcher, 2, sys.executable, "-c", TRAIN, "train", "--output-dir", "run")
    output = output_of(command, tmp_path)
    assert output.count("imported set()") == 2, output
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["top1"] >= 0.98
    assert (summary["world_size"], summary["finished"]) == (2, True)
    assert "next:  hvd-train report run" in output
    files = "config.yaml metrics.jsonl tensorboard checkpoints model-best.pt model-final.pt"
    assert {*files.split()} <= {path.name for path in run.iterdir()}
    if launcher == "gloo":
        assert evaluate(run)["top1"] == pytest.approx(summary["best_top1"], abs=1e-12)


# The test sets the model's pace, so that the training cannot end before it is disturbed.
DISTURBED = f"digits --model {OBEDIENT} --epochs 3 --commit-steps 5".split()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("undisturbed")
    output_of(launch_line("gloo", 2, HVD_TRAIN, "train", *DISTURBED), folder, variables=OF_TESTS)
    return final_weights(folder)


def final_weights(folder: Path) -> Weights:
    (file,) = folder.rglob("model-final.pt")
    return torch.load(file, weights_only=True)


def newest_commit(folder: Path) -> str:
    return max((path.name for path in folder.glob("runs/*/checkpoints/*.ckpt")), default="")


def disturb(
    launcher: str,
    folder: Path,
    number: signal.Signals,
    victim: int | None = None,
    last_pace_s: float = 0.2,
    **variables: str,
) -> tuple[int, str]:
    """Train until the next commit, then signal the launcher or one rank;
    return exit code and output.
    """
    log = folder / "log.txt"
    before = newest_commit(folder)
    pace(folder, 0.2)
    command = launch_line(launcher, 2, HVD_TRAIN, "train", *DISTURBED)
    with started(command, folder, log, {**OF_TESTS, **variables}) as process:
        wait_for("a commit", lambda: newest_commit(folder) > before or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        ranks = sorted(
            ranks_of(process, HVD_TRAIN), key=lambda one: int(one.environ()[RANK[launcher]])
        )
        assert len(ranks) == 2
        pace(folder, last_pace_s)
        (process if victim is None else ranks[victim]).send_signal(number)
        code = process.wait(200)
        _, left = psutil.wait_procs(ranks, timeout=60)
        assert not [rank for rank in left if rank.status() != psutil.STATUS_ZOMBIE]
    pace(folder, 0)
    assert "Traceback" not in log.read_text(), log.read_text()
    return code, log.read_text()


Act = tuple[signal.Signals, int | None]  # a signal to the launcher, or to a rank
KILLED = [(signal.SIGKILL, rank) for rank in range(2)]
STOPPED = [(number, None) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)]
ENDS = [("gloo", [KILLED[0], STOPPED[1]]), ("gloo", [STOPPED[2]])]
ENDS += [("mpi", [*KILLED, STOPPED[0]]), ("mpi", STOPPED[1:])]
ENDS += [("mpirun", [KILLED[1]]), ("launch", [STOPPED[1]])]


@pytest.mark.parametrize(
    ("launcher", "acts"),
    [("gloo", [KILLED[1], STOPPED[0]]), *(pytest.param(*each, marks=slow) for each in ENDS)],
)
def test_a_job_that_was_ended_resumes_bit_identically(
    launcher: str, acts: list[Act], tmp_path: Path, undisturbed: Weights
) -> None:
    """A signal to the launcher, or its death, ends all ranks after one commit; so does a killed
    rank, if another one lives. The same command then ends bit-identical to a run never stopped.
    """
    for number, victim in acts:
        code, output = disturb(launcher, tmp_path, number, victim)
        if victim is not None:
            assert code != 0, output
            assert f"rank {victim}" in output, "the launcher says which rank was killed"
        else:
            assert code == (-number if number == signal.SIGKILL else 128 + number), output
        if (launcher, victim) == ("gloo", 1):  # rank 0 lives and commits; MPI would kill it
            assert re.search(r"step \d+ is committed; the same command resumes", output), output
    (run,) = (tmp_path / "runs").iterdir()
    last = json_lines(run / "metrics.jsonl")[-1].get("message", "")
    output = output_of(
        launch_line(launcher, 2, HVD_TRAIN, "train", *DISTURBED), tmp_path, variables=OF_TESTS
    )
    assert "resuming at epoch" in output
    if victim is None:
        (stopped_at,) = re.findall(r"stopped by SIG\w+ at step (\d+), committed", last)
        assert f"step {stopped_at}" in output.splitlines()[0]
    logged = [line["step"] for line in records("step", run)]
    assert logged == list(range(10, STEPS + 1, 10)), "each logged step stands there once"
    assert equal(final_weights(tmp_path), undisturbed)


@slow
@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_a_rank_that_does_not_end_is_killed_after_the_grace_time(
    launcher: str, tmp_path: Path
) -> None:
    grace = {"HVD_TRAIN_GRACE_SECONDS": "1"}
    code, output = disturb(launcher, tmp_path, signal.SIGINT, None, 1000, **grace)
    assert code == 128 + signal.SIGINT, output


@pytest.mark.parametrize(
    "launcher", ["gloo", pytest.param("mpi", marks=slow), pytest.param("mpirun", marks=slow)]
)
def test_ranks_with_different_settings_are_reported_once(launcher: str, tmp_path: Path) -> None:
    """The line comes before training, and no run folder is left."""
    train = (
        f"{shlex.quote(HVD_TRAIN)} train --device cpu --output-dir run --eval-epochs "
        f"$(({RANK[launcher]} + 1))"
    )
    output = output_of(launch_line(launcher, 2, "sh", "-c", train), tmp_path, code=2)
    assert output.count("the ranks differ in --eval-epochs: 1 on ") == 1, output
    assert "; 2 on " in output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_the_readme_example_trains_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The README's own model on own data trains on two ranks exactly as printed,
    and is loaded as printed. Any launcher may start the ranks: their places come from
    RANK, WORLD_SIZE and the like.
    """
    code, *_, use = re.findall(
        r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL
    )
    (tmp_path / "mine.py").write_text(code)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    job |= {"HVD_TRAIN_PORT": port, "XDG_CACHE_HOME": str(tmp_path)}
    ranks = [f"RANK={rank} LOCAL_RANK={rank} {PYTHON} mine.py" for rank in range(2)]
    line = f"{ranks[1]} & {ranks[0]} && wait $!"
    output_of(["sh", "-c", line], tmp_path, variables=job)
    run = next((tmp_path / "runs").glob("mine-*"))
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["world_size"], summary["top1"] > 0.9) == (2, True)
    monkeypatch.syspath_prepend(tmp_path)
    exec(use.replace("runs/NAME", str(run)))
    assert "tensor([" in capsys.readouterr().out


def test_the_documented_task_trains_as_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (PROJECT / "docs" / "tasks.md").read_text()
    _, code, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "regression.py").write_text(code)
    assert sum(bool(line) for line in code.splitlines()) <= 15
    command = re.search(r"`hvd-train (train --np 2 .*:task)`", page)
    assert command
    more = ["--epochs", "8", "--output-dir", "run"]
    output = output_of([HVD_TRAIN, *command[1].split(), *more], tmp_path)
    assert "1,000 samples" in output
    assert json.loads((tmp_path / "run/summary.json").read_text())["best_error"] < 0.3
    assert cli.run(["evaluate", "run", "--trust"]) == 0
    assert re.search(r"  error \d\.", capsys.readouterr().out)


def test_the_readme_loop_trains_as_printed(tmp_path: Path) -> None:
    """On two ranks, through the script for one machine."""
    _, code, _ = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    assert sum(bool(line) for line in code.splitlines()) <= 20
    script = str(PROJECT / "horovodrun_scripts/train_local.sh")
    output_of([script, "-n", "2", "--", "mine.py", "--output-dir", "run"], tmp_path)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["world_size"], summary["best_loss"] < 10) == (2, True)


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    """Neither a check of its names nor a loader process imports it again."""
    code = """
import hvd_train
from tests.support import runs

def net(num_classes): return runs.convnet(num_classes)
def data(config): return runs.mapped_digits(config)

print("once")
hvd_train.train(runs.small_config(epochs=1, workers=1, output_dir="run"), model=net, data=data)
"""
    (tmp_path / "mine.py").write_text(code)
    assert output_of([sys.executable, "mine.py"], tmp_path, variables=OF_TESTS).count("once") == 1


EXAMPLES = {
    "imagenet": "--train-dir data/train --val-dir data/val --arch resnet18",
    "pytorch_imagenet": "data --arch resnet18|",
    "dcgan": "--data-dir data/train --width 4|",
    "gpt": "tokens --dtype uint16 --vocabulary 1000 --width 32 --layers 1 --block 8|",
    "own_data": "--global-batch-size 228 --batch-size 57",
    "own_model": "--global-batch-size 720 --batch-size 180",
}


@slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_alone_and_on_two_ranks(name: str, tmp_path: Path) -> None:
    """On a few files, tokens or rows, which count once. tests/unit/test_examples.py trains them
    on one rank.

    Batch norm multiplies roundings after the first step.
    """
    jpegs.digits(tmp_path / "data", classes=range(2), most=6)
    np.arange(110, 990, 8, "uint16").tofile(tmp_path / "tokens")
    first, _, last = EXAMPLES[name].rpartition("|")
    line = (
        f"{first} --epochs 1 --global-batch-size 6 --batch-size 3 --log-steps 1 "
        f"--workers 1 --ledger {last}"
    )
    script = [sys.executable, str(PROJECT / f"examples/{name}.py"), *line.split()]
    losses = []
    for name, command in (("alone", script), ("two", launch_line("gloo", 2, *script))):
        output_of([*command, "--output-dir", name], tmp_path)
        output_of([HVD_TRAIN, "audit", name], tmp_path)
        losses.append([line["loss"] for line in records("step", tmp_path / name)])
    assert [len(of_run) for of_run in losses] == [2, 2]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)


@slow
def test_a_sweep_on_two_ranks(tmp_path: Path) -> None:
    """The best run comes first; a failed run has a reason and does not end the others."""
    line = "sweep digits --epochs 1 --device cpu --lr 1e30,0.001,0.2 --np 2 --output-dir out"
    output_of([HVD_TRAIN, *line.split()], tmp_path, code=1)
    rows = json.loads((tmp_path / "out/sweep.json").read_text())
    names = [row["name"] for row in rows]
    assert names == ["learning_rate=0.2", "learning_rate=0.001", "learning_rate=1e30"]
    assert rows[0]["best"] > rows[1]["best"]
    assert "the loss is not finite" in rows[2]["failed"]
    summary = json.loads((tmp_path / "out/002-learning_rate=0.2/summary.json").read_text())
    assert summary["world_size"] == 2


@slow
def test_the_doctor_adds_over_two_ranks_by_every_launcher() -> None:
    """No environment is activated."""
    folders = os.environ["PATH"].split(os.pathsep)
    path = os.pathsep.join(each for each in folders if each != str(Path(HVD_TRAIN).parent))
    done = subprocess.run(
        [HVD_TRAIN, "doctor", "--json"],
        capture_output=True,
        check=True,
        timeout=280,
        env={**os.environ, "PATH": path},
    )
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    for name in ("python", "torch", "horovod", "horovodrun --gloo"):
        assert findings[name]["verdict"] == "ok", findings[name]
    if "MPI" in findings["horovod"]["what"]:
        assert "the sum is right" in findings["horovodrun --mpi"]["what"], findings


@slow
@pytest.mark.parametrize("registers", [True, False])
def test_prove_finds_what_is_not_registered(registers: bool, tmp_path: Path) -> None:
    """A scheduler that counts steps begins again in a run that resumes,
    and in a worker that joins.
    """
    code = (
        Path(OWN_LOOP)
        .read_text()
        .replace("ExponentialLR(optimizer, 0.995)", "StepLR(optimizer, 15, 0.3)")
    )
    (tmp_path / "mine.py").write_text(
        code if registers else code.replace("scheduler=scheduler, ", "")
    )
    line = [HVD_TRAIN, *["prove", "python", "mine.py", "--device", "cpu", "--epochs", "2"]]
    found = output_of(line, tmp_path, code=0 if registers else 1, variables=OF_TESTS).splitlines()
    verdicts = [verdict[21:] for verdict in found[1:4]]
    assert verdicts[1] == "the same within 1e-05"
    assert verdicts[2] == verdicts[1] if registers else "differ from the others" in verdicts[2]
    assert verdicts[0] == "the same to the bit" if registers else "in learning_rate" in verdicts[0]

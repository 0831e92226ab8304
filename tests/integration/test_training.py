"""Whole trainings under real launchers: what a user sees when all goes well, and when it does not."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from tests.support import documented
from tests.support.launching import HVD_TRAIN, finished, launch_line, ranks_of, started, wait_for
from tests.support.runs import Weights, equal

pytestmark = pytest.mark.integration

EPOCHS = 10
STEPS = EPOCHS * 23  # 1,437 images, 64 a step


def own_lines(output: str) -> list[str]:
    """Return the errors that hvd-train itself printed, without the prefixes of launchers."""
    return [line for line in output.splitlines() if "hvd-train: " in line]


@pytest.mark.parametrize("launcher", ["gloo", pytest.param("mpi", marks=pytest.mark.slow), "mpirun"])
def test_digits_reach_98_percent_on_two_ranks(launcher: str, tmp_path: Path) -> None:
    """The default recipe trains to at least 98% top-1 through every launcher and leaves a whole run folder."""
    code, output = finished(launch_line(launcher, 2, HVD_TRAIN, "train", "--output-dir", "run"), tmp_path)
    assert code == 0, output
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["top1"] >= 0.98
    assert summary["world_size"] == 2
    assert summary["finished"]
    assert "next:  hvd-train evaluate run" in output
    for name in ("config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "model-best.pt", "model-final.pt"):
        assert (run / name).exists(), name
    weights = torch.load(run / "model-final.pt", weights_only=True)
    assert all(isinstance(tensor, torch.Tensor) for tensor in weights.values())
    if launcher == "gloo":
        code, printed = finished([HVD_TRAIN, "evaluate", "run", "--json"], tmp_path)
        assert code == 0, printed
        assert json.loads(printed)["top1"] == pytest.approx(summary["best_top1"], abs=1e-12)


def undisturbed_run(folder: Path, *flags: str) -> Weights:
    """Return the final weights of the run that the tests below disturb, when nothing disturbs it."""
    command = launch_line("gloo", 2, HVD_TRAIN, "train", "--epochs", str(EPOCHS), "--output-dir", "run", *flags)
    code, output = finished(command, folder)
    assert code == 0, output
    return final_weights(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Return the final weights of ranks that keep weights of their own."""
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def undisturbed_sharing(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Return the final weights of ranks that share them."""
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), "--shared-weights", "on")


def final_weights(folder: Path) -> Weights:
    """Return the final weights of the one run in a folder."""
    (file,) = folder.rglob("model-final.pt")
    weights: Weights = torch.load(file, weights_only=True)
    return weights


def test_ctrl_c_commits_and_the_same_command_goes_on(tmp_path: Path, undisturbed: Weights) -> None:
    """Ctrl-C ends all ranks after one commit and one line; the same command ends bit-identical to one never stopped."""
    command = launch_line("gloo", 2, HVD_TRAIN, "train", "--epochs", str(EPOCHS))
    log = tmp_path / "log.txt"
    with started(command, tmp_path, log) as process:
        wait_for("the second epoch", lambda: f"epoch  2/{EPOCHS}" in log.read_text())
        ranks = ranks_of(process, HVD_TRAIN)
        process.send_signal(signal.SIGINT)
        code = process.wait(30)
        assert len(ranks) == 2
        assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
    output = log.read_text()
    assert code == 128 + signal.SIGINT, output
    assert len(re.findall(r"stopped by SIG\w+ at step \d+, committed", output)) == 1, output
    assert "Traceback" not in output
    stopped_at = int(re.findall(r"at step (\d+), committed", output)[0])
    code, output = finished(command, tmp_path)
    assert code == 0, output
    assert f"step {stopped_at}" in output.splitlines()[0]
    assert len(list((tmp_path / "runs").iterdir())) == 1
    steps = [json.loads(line) for line in next((tmp_path / "runs").iterdir()).joinpath("metrics.jsonl").open()]
    logged = [record["step"] for record in steps if record["kind"] == "step"]
    assert logged == list(range(10, STEPS + 1, 10)), "each logged step stands there once"
    assert equal(final_weights(tmp_path), undisturbed)


@pytest.mark.parametrize(
    ("launcher", "victim"),
    [
        ("gloo", 0),
        pytest.param("gloo", 1, marks=pytest.mark.slow),
        pytest.param("mpi", 0, marks=pytest.mark.slow),
        ("mpi", 1),
        ("mpirun", 1),
    ],
)
def test_a_killed_rank_ends_the_job_and_loses_nothing(
    launcher: str, victim: int, tmp_path: Path, undisturbed: Weights
) -> None:
    """After SIGKILL of a rank the job soon ends, and the same command ends bit-identical to an undisturbed run."""
    kill_and_go_on(launcher, victim, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "victim"), [("gloo", 0), ("gloo", 1), ("mpi", 1)])
def test_a_killed_rank_of_those_that_share_weights(
    launcher: str, victim: int, tmp_path: Path, undisturbed_sharing: Weights
) -> None:
    """The same holds for them."""
    kill_and_go_on(launcher, victim, tmp_path, undisturbed_sharing, "--shared-weights", "on")


def kill_and_go_on(launcher: str, victim: int, tmp_path: Path, undisturbed: Weights, *flags: str) -> None:
    """Kill a rank, and assert that the job ends as it should and that the same command goes on to these weights."""
    command = launch_line(launcher, 2, HVD_TRAIN, "train", "--epochs", str(EPOCHS), "--commit-steps", "5", *flags)
    log = tmp_path / "log.txt"
    with started(command, tmp_path, log) as process:
        wait_for("the second epoch", lambda: f"epoch  2/{EPOCHS}" in log.read_text())
        variable = "HOROVOD_RANK" if launcher == "gloo" else "OMPI_COMM_WORLD_RANK"
        ranks = sorted(ranks_of(process, HVD_TRAIN), key=lambda p: int(p.environ()[variable]))
        ranks[victim].send_signal(signal.SIGKILL)
        code = process.wait(20)
        _, left = psutil.wait_procs(ranks, timeout=10)
        assert not [rank for rank in left if rank.status() != psutil.STATUS_ZOMBIE]
    output = log.read_text()
    assert code != 0, output
    assert "Traceback" not in output, output
    assert f"rank {victim}" in output, "the launcher says which rank was killed"
    if victim == 1 and launcher == "gloo":  # rank 0 writes, and its weights are whole; MPI does not let it go on
        assert re.search(r"step \d+ is committed; the same command goes on", output), output
    code, output = finished(command, tmp_path)
    assert code == 0, output
    assert "going on at epoch" in "".join(output.splitlines()[:2])  # after a line on a commit that is not verified
    assert equal(final_weights(tmp_path), undisturbed)


BAD = {
    "recipe": (["digitz"], "did you mean 'digits'"),
    "flag": (["--epochz", "3"], "did you mean '--epochs'"),
    "value": (["--precision", "fp8"], "--precision"),
    "model": (["--model", "resnet81"], "did you mean 'resnet18'"),
    "batch": (["--global-batch-size", "5000"], "larger than the training set of 1437"),
    "gpu": (["--device", "cuda"], "--device cpu"),
    "folder": (["--data", "folder", "--data-dir", "nowhere"], "is not a folder"),
    "checkpoint": (["--resume", "nothing.ckpt"], "no such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case: str, tmp_path: Path) -> None:
    """Impossible settings give one line, exit code 2, no traceback, and no run folder."""
    arguments, hint = BAD[case]
    code, output = finished([HVD_TRAIN, "train", *arguments], tmp_path)
    assert code == 2, output
    assert len(output.splitlines()) == 1, output
    assert hint in output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("case", "launcher"),
    [
        ("flag", "gloo"),
        ("flag", "mpi"),
        ("batch", "gloo"),
        pytest.param("batch", "mpi", marks=pytest.mark.slow),  # Open MPI takes seconds to end its ranks
    ],
)
def test_bad_input_on_two_ranks_is_told_once(case: str, launcher: str, tmp_path: Path) -> None:
    """Two ranks with the same bad setting print one line, and the launcher ends with exit code 2."""
    arguments, hint = BAD[case]
    code, output = finished(launch_line(launcher, 2, HVD_TRAIN, "train", *arguments), tmp_path)
    assert code == 2, output
    assert len(own_lines(output)) == 1, output
    assert hint in own_lines(output)[0]
    assert "Traceback" not in output, output


def make_folder(root: Path, per_class: int) -> None:
    """Write class folders of JPEG files: three classes of coloured squares."""
    for split, count in (("train", per_class), ("val", 4)):
        for number, colour in enumerate([(200, 30, 30), (30, 200, 30), (30, 30, 200)]):
            folder = root / split / f"class{number}"
            folder.mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (40 + index, 36), tuple(min(255, c + 3 * index) for c in colour)).save(
                    folder / f"{index}.jpg"
                )


FOLDER = ["--data", "folder", "--data-dir", "images", "--image-size", "32", "--model", "squeezenet1_1"]


@pytest.mark.parametrize("launcher", ["gloo", "mpi", "mpirun"])
def test_ranks_of_other_settings_are_told_once(launcher: str, tmp_path: Path) -> None:
    """Ranks with different settings are reported in one line before training, without a run folder."""
    rank = "HOROVOD_RANK" if launcher == "gloo" else "OMPI_COMM_WORLD_RANK"
    train = f"{shlex.quote(HVD_TRAIN)} train digits --device cpu --output-dir run --eval-epochs $(({rank} + 1))"
    code, output = finished(launch_line(launcher, 2, "sh", "-c", train), tmp_path)
    assert code == 2, output
    assert output.count("the ranks differ in --eval-epochs: 1 on ") == 1, output
    assert "; 2 on " in output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_class_folders_train_on_two_ranks(tmp_path: Path) -> None:
    """JPEG class folders train through loader processes on two ranks, and evaluate to the same on one."""
    make_folder(tmp_path / "images", per_class=8)
    flags = [*FOLDER, "--batch-size", "4", "--epochs", "2", "--workers", "1", "--output-dir", "run"]
    code, output = finished(launch_line("gloo", 2, HVD_TRAIN, "train", *flags), tmp_path)
    assert code == 0, output
    scores = []
    for ranks in (1, 2):
        launcher = "none" if ranks == 1 else "gloo"
        code, printed = finished(launch_line(launcher, ranks, HVD_TRAIN, "evaluate", "run", "--json"), tmp_path)
        assert code == 0, printed
        scores.append(json.loads(printed[printed.index("{") :]))
    assert scores[0]["count"] == 12
    assert scores[0]["top1"] == scores[1]["top1"]
    assert scores[0]["loss"] == pytest.approx(scores[1]["loss"], rel=1e-5)


def test_an_unreadable_image_on_one_rank_ends_all_and_is_named_once(tmp_path: Path) -> None:
    """A rank that meets a damaged image names it in one line, and the job ends with its exit code."""
    make_folder(tmp_path / "images", per_class=8)
    broken = tmp_path / "images" / "train" / "class1" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:40])
    flags = [*FOLDER, "--batch-size", "2", "--epochs", "2", "--workers", "0"]
    code, output = finished(launch_line("gloo", 2, HVD_TRAIN, "train", *flags), tmp_path)
    assert code == 2, output
    named = [line for line in own_lines(output) if "3.jpg" in line]
    assert len(named) == 1, output
    assert re.search(r"rank [01] on \S+: cannot read the image", named[0])
    assert "Traceback" not in output, output


def test_a_folder_of_other_settings_is_refused_and_kept(tmp_path: Path) -> None:
    """A run folder of other settings is refused with what differs; --resume never moves it aside."""
    train = [HVD_TRAIN, "train", "--output-dir", "run", "--epochs"]
    assert finished([*train, "2"], tmp_path)[0] == 0
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    code, output = finished([*train, "3", "--lr", "0.2"], tmp_path)
    assert code == 2
    assert "learning_rate: 0.2, not 0.1" in output
    assert "--resume never" in output
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before
    code, output = finished([*train, "3", "--resume", "never"], tmp_path)
    assert code == 0, output
    assert (tmp_path / "run.old" / "config.yaml").read_bytes() == before


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """--resume FILE with a checkpoint of another model is one line, before a folder is made."""
    assert finished([HVD_TRAIN, "train", "--output-dir", "run", "--epochs", "1"], tmp_path)[0] == 0
    file = next((tmp_path / "run" / "checkpoints").iterdir())
    flags = ["--model", "squeezenet1_1", "--image-size", "32", "--resume", str(file), "--output-dir", "other"]
    code, output = finished([HVD_TRAIN, "train", *flags], tmp_path)
    assert code == 2, output
    assert "another model" in output
    assert len(output.splitlines()) == 1
    assert not (tmp_path / "other").exists()


def test_the_readme_example_trains_as_printed(tmp_path: Path) -> None:
    """The README's own model on own data trains on two ranks exactly as printed."""
    (tmp_path / "mine.py").write_text(documented.program("mine.py"))
    code, output = finished(launch_line("gloo", 2, sys.executable, "mine.py"), tmp_path)
    assert code == 0, output
    run = next((tmp_path / "runs").glob("mine-*"))
    assert json.loads((run / "summary.json").read_text())["top1"] > 0.9
    code, printed = finished([HVD_TRAIN, "evaluate", str(run), "--trust"], tmp_path)
    assert code == 0, printed


def test_the_documented_task_trains_as_printed(tmp_path: Path) -> None:
    """The task of docs/tasks.md reaches on two ranks the error that it promises, exactly as printed."""
    (tmp_path / "forecast.py").write_text(documented.program("forecast.py"))
    code, output = finished(launch_line("gloo", 2, sys.executable, "forecast.py"), tmp_path)
    assert code == 0, output
    run = next((tmp_path / "runs").glob("forecast-*"))
    assert json.loads((run / "summary.json").read_text())["best_error"] < 0.01


@pytest.mark.slow
def test_the_readme_shows_how_to_use_what_was_trained(tmp_path: Path) -> None:
    """The exported program names the digits, exactly as printed, in a program that imports none of our code."""
    (tmp_path / "use.py").write_text(documented.program("use.py"))
    code, output = finished([HVD_TRAIN, "train", "digits", "--epochs", "10", "--output-dir", "run"], tmp_path)
    assert code == 0, output
    code, output = finished([HVD_TRAIN, "export", "run"], tmp_path)
    assert code == 0, output
    code, output = finished([sys.executable, "use.py", "run/export"], tmp_path)
    assert (code, output) == (0, f"{[str(digit) for digit in range(8)]}\n")


LATE = """
import sys, time
from mpi4py import MPI
from hvd_train.launch import mpi_roll_call
time.sleep(2 * MPI.COMM_WORLD.rank)
start = time.thread_time()
mpi_roll_call.come_together(MPI.COMM_WORLD)
sys.exit(time.thread_time() - start > 0.2)
"""


@pytest.mark.slow
def test_ranks_of_mpi_come_together_asleep(tmp_path: Path) -> None:
    """A rank that is early leaves its core to others, which MPI's own barrier does not."""
    (tmp_path / "late.py").write_text(LATE)
    code, output = finished(launch_line("mpirun", 2, sys.executable, "late.py"), tmp_path)
    assert code == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_sweep_in_one_mpi_job(workers: int, tmp_path: Path) -> None:
    """Two ranks train two runs at a time, or one run after the other together; a failed one does not end the rest."""
    line = f"sweep digits --epochs 2 --device cpu --lr 0.1,1e30,0.05 --workers-per-run {workers} --output-dir out"
    code, output = finished(launch_line("mpirun", 2, HVD_TRAIN, *line.split()), tmp_path)
    assert code == 1, output
    rows = {row["name"]: row for row in json.loads((tmp_path / "out/sweep.json").read_text())}
    assert {name: row["failed"] is None for name, row in rows.items()} == {
        "lr=0.1": True,
        "lr=0.05": True,
        "lr=1e30": False,
    }
    for name, row in rows.items():
        summary = tmp_path / row["run"] / "summary.json"
        if name != "lr=1e30":
            assert json.loads(summary.read_text())["world_size"] == workers
    code, output = finished(launch_line("mpirun", 2, HVD_TRAIN, "train", "--lr", "nope"), tmp_path)
    assert code == 2
    assert "hvd-train: --learning-rate: it must be a number, not 'nope'" in output

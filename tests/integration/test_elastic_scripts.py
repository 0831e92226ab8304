"""The scripts discover_hosts.sh and train_elastic.sh on this machine: their output, errors, and a real training."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from hvd_train.run_files.ledger import audit
from tests.support import jpegs, on_demand
from tests.support.launching import HVD_TRAIN, PROGRAMS, finished, ranks_of, started, wait_for
from tests.support.programs import write_program

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "horovodrun_scripts"
pytestmark = pytest.mark.integration


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a user does, and return what came of it."""
    env = {
        **os.environ,
        "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        **environment,
    }
    command = [str(SCRIPTS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)


def test_a_host_file_in_any_form_is_printed_as_horovod_wants_it() -> None:
    """Comments and blank lines are skipped, and a host without a number has one slot."""
    Path("hosts").write_text("# ours\n\nh1 slots=4  # four GPUs\nh2:2\nh3\nh4 slots = 3 max_slots=8\n")
    assert run("discover_hosts.sh", "hosts").stdout == "h1:4\nh2:2\nh3:1\nh4:3\n"
    assert run("discover_hosts.sh", "--command", "cat hosts").stdout == "h1:4\nh2:2\nh3:1\nh4:3\n"
    Path("hosts").write_text("# all are away\n")
    done = run("discover_hosts.sh", "hosts")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["hosts"], 1, 'hosts, line 2: "h2 two" is not of the form "NAME slots=N"'),
        (["nowhere"], 1, "there is no host file nowhere"),
        (["--command", "exit 4"], 1, "exit 4 failed"),
        (["--command", "echo a b c"], 1, "line 1"),
        (["--command", "echo -G"], 1, '"-G" is not of the form "NAME slots=N"'),
        (["--slurm"], 2, "there is no Slurm allocation here"),
        ([], 2, "which host file?"),
    ],
)
def test_a_list_that_cannot_be_read_is_one_line(arguments: list[str], code: int, message: str) -> None:
    """A bad list of hosts is one line on stderr; the exit code makes a running job keep its list."""
    Path("hosts").write_text("h1\nh2 two\n")
    done = run("discover_hosts.sh", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nodes_that_do_not_answer_are_left_out(tmp_path: Path) -> None:
    """Nodes whose state sinfo marks with *, since they do not answer, are left out."""
    sinfo = tmp_path / "bin" / "sinfo"
    sinfo.parent.mkdir()
    sinfo.write_text("#!/bin/sh\nprintf 'n1 alloc\\nn2 alloc*\\nn3 down\\nn4 mix\\nn5 failg\\n'\n")
    sinfo.chmod(0o755)
    environment = {"PATH": f"{sinfo.parent}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-5]"}
    assert run("discover_hosts.sh", "--slurm", **environment).stdout == "n1:1\nn4:1\n"
    assert run("discover_hosts.sh", "--slurm", SLURM_GPUS_ON_NODE="8", **environment).stdout == "n1:8\nn4:8\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning-rate", "fast"], "learning-rate"),
        (["--model", "resnet1000"], "unknown model 'resnet1000'"),
        (["--resume", "nothing.ckpt"], "--resume nothing.ckpt: no such file"),
    ],
)
def test_wrong_settings_are_told_before_anything_starts(arguments: list[str], message: str) -> None:
    """Wrong settings are one line with exit code 2, before any worker starts or any folder is made."""
    done = run("train_elastic.sh", "--", "digits", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "nowhere"], "there is no host file 'nowhere'"),
        (["--min-np", "none"], "--min-np takes a number from 1, not 'none'"),
        (["--min-np", "4", "--max-np", "2"], "--max-np 2 is less than --min-np 4"),
        (["digits"], "what is for hvd-train train, or a program, goes after --"),
        (["--discover", ""], "--discover takes a command"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str) -> None:
    """A wrong argument is one line with exit code 2, before anything is started."""
    done = run("train_elastic.sh", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_hosts_that_cannot_be_are_told_before_anything_starts() -> None:
    """Each name that nobody knows is a line, with exit code 2, in place of a minute of attempts."""
    Path("hosts").write_text("localhost slots=2\nh1.invalid\nh2.invalid slots=4\n")
    done = run("train_elastic.sh", "--hosts", "hosts", "--", "digits")
    assert done.returncode == 2
    lines = done.stderr.removeprefix("train_elastic.sh: ").splitlines()
    assert sorted(line.partition(" ")[0] for line in lines) == ["h1.invalid", "h2.invalid"]
    assert all(line.endswith(" true`, or take it out of hosts") for line in lines)


def test_a_host_that_does_not_answer_may_come_later(tmp_path: Path) -> None:
    """It is no mistake; the settings are, which are looked at after the hosts."""
    Path("hosts").write_text("localhost slots=2\nh1\n")
    write_program(tmp_path, "ssh", "echo 'ssh: connect to host h1 port 22: Connection refused' >&2; exit 255")
    done = run(
        "train_elastic.sh", "--hosts", "hosts", "--", "--np", "2", PATH=f"{tmp_path}:{PROGRAMS}:{os.environ['PATH']}"
    )
    assert (done.returncode, done.stderr) == (2, "hvd-train: --np: config starts no ranks; leave it out\n")


def test_the_start_waits_for_the_slots_listed() -> None:
    """The job starts with as many workers as there are slots, but with no more than --max-np."""
    Path("hosts").write_text("h1 slots=4\nh2 slots=4\n")
    words = shlex.split(
        run("train_elastic.sh", "--dry-run", "--hosts", "hosts", "--", "digits", "--epochs", "2").stdout
    )
    assert words[words.index("-np") + 1] == "8"
    assert words[-4:] == ["train", "digits", "--epochs", "2"]
    words = shlex.split(run("train_elastic.sh", "--dry-run", "--hosts", "hosts", "--max-np", "6").stdout)
    assert words[words.index("-np") + 1] == "6"


def test_paths_outside_ascii_in_the_plainest_locale() -> None:
    """Under LC_ALL=C, as cron and many containers have it, a job trains in a folder of any name."""
    folder = Path("Größe 'x' $HOME")
    folder.mkdir()
    (folder / "hosts").write_text("localhost slots=2\n")
    line = ["--hosts", f"{folder}/hosts", "--", "digits", "--epochs", "1", "--output-dir", f"{folder}/run"]
    done = run("train_elastic.sh", *line, LC_ALL="C", LANG="C", PYTHONUTF8="", PYTHONCOERCECLOCALE="")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "run" / "summary.json").read_text())["world_size"] == 2


def test_wrong_settings_end_it_with_one_line() -> None:
    """Data that are missing end the job at once, since another try on another host would fail as well."""
    done = run("train_elastic.sh", "--", "digits", "--data", "folder", "--data-dir", "nowhere")
    assert done.returncode == 2, done.stderr
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shared_weights", ["off", "on"])
def test_one_machine_survives_a_crash_and_a_stop(shared_weights: str, tmp_path: Path) -> None:
    """A killed worker does not end a job on one host, as Horovod's driver would; SIGTERM to the script commits.

    Neither does the end of the driver, nor that of all workers at once: without --output-dir, too, the job goes on in
    the folder that it has. Only one run comes of it.
    """
    command = [str(SCRIPTS / "train_elastic.sh"), "-np", "2", "--", "digits", "--resume", "never"]
    command += ["--epochs", "4000", "--ledger", "--commit-steps", "20", "--shared-weights", shared_weights]
    output = tmp_path / "output.txt"

    def of_run(name: str, word: str) -> int:
        return sum(path.read_text().count(word) for path in tmp_path.glob(f"runs/*/{name}"))

    def workers() -> list[psutil.Process]:
        return [process for process in ranks_of(script, "train") if process.cmdline()[1].endswith("hvd-train")]

    with started(command, tmp_path, output) as script:
        wait_for("the first steps", lambda: of_run("ledger.jsonl", "\n") > 10, limit_s=60)
        workers()[0].kill()
        wait_for("the survivor and then a newcomer", lambda: of_run("metrics.jsonl", '"name": "world"') > 1, limit_s=90)
        former = workers()
        for worker in former:
            worker.suspend()  # so that they hold the folder when the next ones come
        next(one for one in ranks_of(script, "train") if "hvd_train.elastic.driver" in one.cmdline()[:3]).kill()
        wait_for("the next ones to wait", lambda: "another process is training in runs" in output.read_text())
        for worker in former:
            worker.resume()
        wait_for("the job to go on", lambda: output.read_text().count("going on at") == 1, limit_s=120)
        latter = workers()
        for worker in latter:
            worker.suspend()  # or the second would see the first one die, and live on
        for worker in latter:
            worker.kill()
        wait_for("the job to go on again", lambda: output.read_text().count("going on at") == 2, limit_s=120)
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 128 + signal.SIGTERM, output.read_text()
    assert "committed; the same command goes on from there" in output.read_text()
    (run,) = (tmp_path / "runs").iterdir()
    report = audit(run)
    assert (report.faults, report.world_sizes) == ((), (1, 2))


def ended(folder: Path, *arguments: str) -> tuple[int, str]:
    """Train on two workers of this machine to the end of the job; return its exit code and all that it printed."""
    command = ["env", f"PYTHONPATH={ROOT}", str(SCRIPTS / "train_elastic.sh"), "--", *arguments]
    return finished(command, folder)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_typo_in_the_model_ends_the_job(tmp_path: Path) -> None:
    """After three workers have met it, with one traceback and one line why; the supervisor does not try again."""
    code, output = ended(tmp_path, "digits", "--model", "tests.support.on_demand:misspelt")
    assert code == 5, output
    assert output.count("Traceback") == 1
    assert output.count("NameError: a typo in the model of 10 classes\n") == 1
    assert "3 workers in a row ended with an error before the ranks met (see above)" in output


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_other_settings_in_the_run_folder_end_the_job(tmp_path: Path) -> None:
    """All ranks learn of them when they meet; the first meeting is the last one, and the user reads one line."""
    run_folder = ["digits", "--output-dir", "run", "--epochs", "1"]
    assert finished([HVD_TRAIN, "train", *run_folder], tmp_path)[0] == 0
    code, output = ended(tmp_path, *run_folder, "--learning-rate", "0.07")
    assert code == 2, output
    assert output.count("is a run with other settings (learning_rate: 0.07, not 0.1)") == 1
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_torn_picture_ends_the_job(tmp_path: Path) -> None:
    """It kills three workers in turn, with one line that names it; the steps before it are committed."""
    torn = next((jpegs.digits(tmp_path / "data", range(3), most=40) / "train" / "01").iterdir())
    torn.write_bytes(torn.read_bytes()[:-20])
    line = "--data folder --data-dir data --model tests.support.on_demand:flat --image-size 32 --augment none "
    line += "--global-batch-size 6 --batch-size 3 --epochs 2 --commit-seconds 1000 --output-dir run"
    code, output = ended(tmp_path, *line.split())
    assert code == 2, output
    assert output.count(torn.name) == 1, output
    assert "3 workers in a row ended with an error in step" in output
    assert "going on at" in output, output


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("workers", "deaths", "flags"),
    [
        (6, ["forward"] * 5, "--batch-size 20"),
        (2, ["update"], "--batch-size 10 --compression bf16"),
    ],
    ids=["a wave", "bf16"],
)
def test_deaths_within_one_step_do_not_end_the_job(workers: int, deaths: list[str], flags: str, tmp_path: Path) -> None:
    """A death in each attempt at a step, or one among gradients as bf16: no step is lost, every sample counts once."""
    discover = ["--discover", f"echo localhost:{workers}", "--"]
    command = ["env", f"PYTHONPATH={ROOT}", str(SCRIPTS / "train_elastic.sh"), *discover]
    line = f"--data digits --model tests.support.on_demand:obedient --epochs 1 --global-batch-size 20 {flags} "
    line += "--ledger --log-steps 1 --augment none --commit-seconds 1000 --output-dir run"
    ledger, output = tmp_path / "run" / "ledger.jsonl", tmp_path / "output.txt"
    host = socket.gethostname()
    with started([*command, *line.split()], tmp_path, output) as script:
        wait_for("a step", lambda: ledger.exists() and ledger.read_bytes().count(b"\n") > 2, limit_s=120)
        on_demand.pace(tmp_path, 2)
        for place in deaths:
            on_demand.order(tmp_path, place, host, "die")
            wait_for("a death", lambda place=place: on_demand.obeyed(tmp_path, place, host), limit_s=60)
        (tmp_path / "pace").unlink()
        assert script.wait(150) == 0, output.read_text()
    report = audit(tmp_path / "run")
    assert (report.faults, report.steps) == ((), 72), report
    assert output.read_text().count("0 steps lost") == output.read_text().count("steps lost") > 0

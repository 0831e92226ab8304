"""discover_hosts.sh and train_elastic.sh on this machine: output, errors and real trainings."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_train.run_files.ledger import audit
from tests.support import launching
from tests.support.launching import LOCALHOST, SCRIPTS, json_lines, ranks_of, started, wait_for

pytestmark = pytest.mark.integration


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return launching.run(script, *arguments, cwd=Path(), timeout_s=280, **environment)


def test_a_host_file_in_any_form_is_printed_as_horovod_wants_it() -> None:
    """Comments and blank lines are skipped; a host without a number has one slot."""
    Path("hosts").write_text("# ours\n\nh1 slots=4  # four GPUs\nh2:2\nh3\nh4 slots = 3 max_slots=8\n")
    assert run("discover_hosts.sh", "hosts").stdout == "h1:4\nh2:2\nh3:1\nh4:3\n"
    assert run("discover_hosts.sh", "--command", "cat hosts").stdout == "h1:4\nh2:2\nh3:1\nh4:3\n"
    Path("hosts").write_text("# all are away\n")
    assert run("discover_hosts.sh", "hosts").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["hosts"], 1, 'hosts, line 2: "h2 two" is not of the form "NAME slots=N"'),
        (["nowhere"], 1, "there is no host file nowhere"),
        (["--command", "exit 4"], 1, "exit 4 failed"),
        (["--command", "echo -G"], 1, '"-G" is not of the form "NAME slots=N"'),
        (["--slurm"], 2, "there is no Slurm allocation here"),
        ([], 2, "which host file?"),
    ],
)
def test_a_list_that_cannot_be_read_is_one_line(arguments: list[str], code: int, message: str) -> None:
    """The exit code makes a running job keep its list."""
    Path("hosts").write_text("h1\nh2 two\n")
    done = run("discover_hosts.sh", *arguments)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1)
    assert message in done.stderr


def test_nodes_that_do_not_answer_are_left_out(tmp_path: Path) -> None:
    """sinfo marks their state with *."""
    states = r"printf 'n1 alloc\nn2 alloc*\nn3 down\nn4 mix\nn5 failg\n'"
    sinfo = launching.program(tmp_path / "bin" / "sinfo", states)
    environment = {"PATH": f"{sinfo.parent}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-5]"}
    assert run("discover_hosts.sh", "--slurm", **environment).stdout == "n1:1\nn4:1\n"
    assert run("discover_hosts.sh", "--slurm", SLURM_GPUS_ON_NODE="8", **environment).stdout == "n1:8\nn4:8\n"


def test_wrong_settings_are_refused_before_anything_starts() -> None:
    done = run("train_elastic.sh", "--", "digits", "--learning-rate", "fast")
    assert (done.returncode, len(done.stderr.splitlines()), list(Path().iterdir())) == (2, 1, [])
    assert "learning-rate" in done.stderr


def test_the_start_waits_for_the_slots_listed() -> None:
    """--max-np limits the number of workers at the start."""
    Path("hosts").write_text("h1 slots=4\nh2 slots=4\n")
    for options, workers in (([], "8"), (["--max-np", "6"], "6")):
        line = launching.dry_run("train_elastic.sh", "--hosts", "hosts", *options, "--", "digits", cwd=Path())
        assert line[line.index("-np") + 1] == workers
        assert line[-2:] == ["train", "digits"]


@pytest.mark.slow
def test_paths_outside_ascii_in_the_plainest_locale() -> None:
    """cron and many containers run under LC_ALL=C."""
    folder = Path("Größe 'x' $HOME")
    folder.mkdir()
    (folder / "hosts").write_text("localhost slots=2\n")
    line = ["--hosts", f"{folder}/hosts", "--", "digits", "--epochs", "1", "--output-dir", f"{folder}/run"]
    done = run("train_elastic.sh", *line, LC_ALL="C", LANG="C", PYTHONUTF8="", PYTHONCOERCECLOCALE="")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "run" / "summary.json").read_text())["world_size"] == 2


def changes_of(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("runs/*/metrics.jsonl") for line in json_lines(path)]
    return [line for line in lines if line.get("name") == "world"]


def workers_of(script: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [process for process in ranks_of(script, "train") if process.cmdline()[1].endswith("hvd-train")]


# The host file has two slots. Without one, a machine with a single core has one.
JOB = [str(SCRIPTS / "train_elastic.sh"), "--hosts", str(LOCALHOST), "--"]
ENDLESS = [*JOB, "digits", "--epochs", "4000", "--ledger"]


def crash(script: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for the first steps, kill one worker, and wait until the survivor and then a newcomer train."""

    def wait(what: str, condition: Callable[[], object]) -> None:
        wait_for(what, lambda: condition() or script.poll() is not None)
        assert script.poll() is None, (folder / "output.txt").read_text()

    wait("ten steps", lambda: [path for path in folder.glob("runs/*/ledger.jsonl") if len(json_lines(path)) > 10])
    workers_of(script)[0].kill()
    wait("the survivor to continue", lambda: changes_of(folder))
    wait("a newcomer to join", lambda: any(change["came"] for change in changes_of(folder)))


def stop(script: subprocess.Popen[bytes], folder: Path) -> None:
    """Send SIGTERM to the script, and check that the job commits and that its ledger is exact."""
    output = folder / "output.txt"
    script.send_signal(signal.SIGTERM)
    assert script.wait(200) == 128 + signal.SIGTERM, output.read_text()
    assert "committed; the same command resumes from there" in output.read_text()
    (run,) = (folder / "runs").iterdir()
    report = audit(run)
    assert (report.faults, report.world_sizes) == ((), (1, 2))


def test_a_killed_worker_is_replaced_and_no_sample_is_lost(tmp_path: Path) -> None:
    """After kill -9 the survivor continues and a newcomer joins; SIGTERM commits."""
    with started(ENDLESS, tmp_path, tmp_path / "output.txt") as script:
        crash(script, tmp_path)
        stop(script, tmp_path)
    changes = changes_of(tmp_path)
    assert changes[0]["left"] and changes[-1]["world_size"] == 2
    assert all(change["steps_lost"] == 0 for change in changes)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_without_output_dir_continues_in_its_own_folder(tmp_path: Path) -> None:
    """The job survives a crash, the end of its driver and the end of all workers."""
    output = tmp_path / "output.txt"
    command = [*ENDLESS, "--resume", "never", "--commit-steps", "20"]
    with started(command, tmp_path, output) as script:
        crash(script, tmp_path)
        former = workers_of(script)
        for worker in former:
            worker.suspend()  # so that they hold the folder when new workers come
        next(one for one in ranks_of(script, "train") if "hvd_train.elastic.driver" in one.cmdline()[:3]).kill()
        wait_for("new workers to wait", lambda: "another process is training in runs" in output.read_text())
        for worker in former:
            worker.resume()
        wait_for("the job to resume", lambda: output.read_text().count("resuming at") == 1)
        latter = workers_of(script)
        for worker in latter:
            worker.suspend()  # or the second would survive the first
        for worker in latter:
            worker.kill()
        wait_for("the job to resume again", lambda: output.read_text().count("resuming at") == 2)
        stop(script, tmp_path)

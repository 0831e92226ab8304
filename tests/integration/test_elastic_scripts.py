"""train_elastic.sh on this machine: errors and real trainings."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_train.run_files.ledger import audit
from tests.support import launching
from tests.support.launching import SCRIPTS, json_lines, ranks_of, started, wait_for

pytestmark = pytest.mark.integration


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return launching.run(script, *arguments, cwd=Path(), timeout_s=280, **environment)


def test_wrong_settings_are_refused_before_anything_starts() -> None:
    done = run("train_elastic.sh", "--", "digits", "--learning-rate", "fast")
    assert (done.returncode, len(done.stderr.splitlines()), list(Path().iterdir())) == (2, 1, [])
    assert "learning-rate" in done.stderr


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


@pytest.mark.parametrize("workers", [2, *(pytest.param(many, marks=pytest.mark.slow) for many in (16, 32))])
def test_a_killed_worker_is_replaced_and_no_sample_is_lost(workers: int, tmp_path: Path) -> None:
    """After kill -9 the survivors continue and a newcomer joins; SIGTERM commits."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"localhost slots={workers}\n")
    command = [str(SCRIPTS / "train_elastic.sh"), "--hosts", str(hosts), "--", "digits", "--epochs", "4000"]
    command += ["--batch-size", "2"] if workers > 2 else []
    run, log = tmp_path / "run", tmp_path / "output.txt"
    with started([*command, "--ledger", "--output-dir", "run"], tmp_path, log) as script:

        def changes() -> list[dict[str, Any]]:
            return [line for line in json_lines(run / "metrics.jsonl") if line.get("name") == "world"]

        def wait(what: str, condition: Callable[[], object]) -> None:
            wait_for(what, lambda: condition() or script.poll() is not None)
            assert script.poll() is None, log.read_text()

        wait("ten steps", lambda: len(json_lines(run / "ledger.jsonl")) > 10)
        next(one for one in ranks_of(script, "train") if one.cmdline()[1].endswith("hvd-train")).kill()
        wait("the survivor to continue", changes)
        wait("a newcomer to join", lambda: any(change["came"] for change in changes()))
        script.send_signal(signal.SIGTERM)
        assert script.wait(200) == 128 + signal.SIGTERM, log.read_text()
    assert "committed; the same command resumes from there" in log.read_text()
    report = audit(run)
    assert (report.faults, report.world_sizes) == ((), (workers - 1, workers))
    assert changes()[0]["left"] and changes()[-1]["world_size"] == workers
    assert all(change["steps_lost"] == 0 for change in changes())

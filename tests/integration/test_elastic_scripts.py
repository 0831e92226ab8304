"""train_elastic.sh on this machine: real trainings."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_train.run_files.ledger import audit
from tests.support.launching import SCRIPTS, json_lines, ranks_of, started, wait_for

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "workers", [2, *(pytest.param(many, marks=pytest.mark.slow) for many in (16, 32))]
)
def test_a_killed_worker_is_replaced_and_no_sample_is_lost(workers: int, tmp_path: Path) -> None:
    """After kill -9 the survivors continue and a newcomer joins; SIGTERM commits."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"localhost slots={workers}\n")
    command = [
        str(SCRIPTS / "train_elastic.sh"),
        "--hosts",
        str(hosts),
        "--",
        "digits",
        "--epochs",
        "4000",
    ]
    command += ["--batch-size", "2"] if workers > 2 else []
    folder = tmp_path / "run"
    log = tmp_path / "output.txt"
    with started([*command, "--ledger", "--output-dir", "run"], tmp_path, log) as script:

        def changes() -> list[dict[str, Any]]:
            return [
                line for line in json_lines(folder / "metrics.jsonl") if line.get("name") == "world"
            ]

        def wait(what: str, condition: Callable[[], object]) -> None:
            wait_for(what, lambda: condition() or script.poll() is not None)
            assert script.poll() is None, log.read_text()

        wait("ten steps", lambda: len(json_lines(folder / "ledger.jsonl")) > 10)
        next(
            one for one in ranks_of(script, "train") if one.cmdline()[1].endswith("hvd-train")
        ).kill()
        wait("the survivor to continue", changes)
        wait("a newcomer to join", lambda: any(change["came"] for change in changes()))
        script.send_signal(signal.SIGTERM)
        assert script.wait(200) == 128 + signal.SIGTERM, log.read_text()
    assert "committed; the same command resumes from there" in log.read_text()
    report = audit(folder)
    assert (report.faults, report.world_sizes) == ((), (workers - 1, workers))
    assert changes()[0]["left"] and changes()[-1]["world_size"] == workers
    assert all(change["steps_lost"] == 0 for change in changes())

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

        def sizes() -> list[int]:
            lines = json_lines(folder / "metrics.jsonl")
            return [line["world_size"] for line in lines if line.get("name") in ("start", "world")]

        # On a slow machine the first world is smaller.
        wait("all workers", lambda: sizes()[-1:] == [workers])
        before = len(changes())
        next(
            one for one in ranks_of(script, "train") if one.cmdline()[1].endswith("hvd-train")
        ).kill()
        wait("the survivor to continue", lambda: changes()[before:])
        wait("a newcomer to join", lambda: any(change["came"] for change in changes()[before:]))
        script.send_signal(signal.SIGTERM)
        assert script.wait(200) == 128 + signal.SIGTERM, log.read_text()
    assert "committed; the same command resumes from there" in log.read_text()
    report = audit(folder)
    assert report.faults == ()
    assert {workers - 1, workers} <= {*report.world_sizes}
    assert changes()[before]["left"] and changes()[-1]["world_size"] == workers
    assert all(change["steps_lost"] == 0 for change in changes())

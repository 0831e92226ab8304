"""train_elastic.sh on this machine: real trainings."""

import signal
from pathlib import Path

import pytest

from hvd_train.run_files.ledger import audit
from tests.support.hosts import Training
from tests.support.launching import HVD_TRAIN, SCRIPTS, ranks_of, started

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "workers", [2, *(pytest.param(many, marks=pytest.mark.slow) for many in (16, 32))]
)
def test_a_killed_worker_is_replaced_and_no_sample_is_lost(workers: int, tmp_path: Path) -> None:
    """After kill -9 the survivors continue and a newcomer joins; SIGTERM commits."""
    (tmp_path / "hosts").write_text(f"localhost slots={workers}\n")
    line = "--hosts hosts -- digits --epochs 4000 --ledger --output-dir run"
    command = [str(SCRIPTS / "train_elastic.sh"), *line.split()]
    command += ["--batch-size", "2"] if workers > 2 else []
    with started(command, tmp_path, tmp_path / "output.txt") as script:
        running = Training(tmp_path, script)
        # On a slow machine the first world is smaller.
        running.wait_for(
            "all workers", lambda: [w["world_size"] for w in running.worlds[-1:]] == [workers]
        )
        before = len(running.changes)
        victim = next(one for one in ranks_of(script, "train") if HVD_TRAIN in one.cmdline()[:2])
        victim.kill()
        running.wait_for(
            "a newcomer to join", lambda: any(c["came"] for c in running.changes[before:])
        )
        script.send_signal(signal.SIGTERM)
        assert script.wait(200) == 128 + signal.SIGTERM, running.output
    assert "committed; the same command resumes from there" in running.output
    report = audit(running.run)
    assert report.faults == ()
    assert {workers - 1, workers} <= {*report.world_sizes}
    assert running.changes[before]["left"] and running.changes[-1]["world_size"] == workers
    assert all(change["steps_lost"] == 0 for change in running.changes)

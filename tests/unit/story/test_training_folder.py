"""One job has one run folder, whichever of its ranks writes into it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_train.run_files.ledger import audit
from tests.support.elastic import Hosts, Kill, run_elastic
from tests.support.runs import small_config, trained


@pytest.mark.parametrize("event", [Kill(4, rank=0), Hosts(4, (("h2", 1),))], ids=str)
def test_a_new_rank_0_writes_where_the_one_before_did(event: Kill | Hosts) -> None:
    """Without --output-dir too, where only rank 0 has chosen the folder; its ledger has every step once."""
    config = small_config(epochs=1, output_dir=None, recipe="few", resume="never", ledger=True)
    job = run_elastic(lambda world: trained(world, config), {"h1": 1, "h2": 1}, [event], first=2, most=2)
    (folder,) = Path("runs").iterdir()
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 1, 10)
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = [record for record in told if record["kind"] == "event"]
    assert [event["name"] for event in events].count("start") == 1
    assert {result.run_dir for result, _ in job.results} <= {folder, None}

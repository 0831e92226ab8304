"""What the benchmarks say of speed: turns, ratios, verdicts, and the pages that repeat the records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bare, networks, page, speed, turns
from benchmarks.record import RECORDS


@dataclass
class Logged:
    """A program whose turns all take a second per step, and are written to a list that programs share."""

    name: str
    log: list[str]

    def turn(self, steps: int) -> float:
        """Take a turn."""
        self.log.append(f"{self.name}{steps}")
        return 1.0


def test_programs_of_a_series_take_turns_to_and_fro() -> None:
    """Of three programs each goes before and after the others, and turns to warm up are not among the times."""
    log: list[str] = []
    programs: Any = {name: Logged(name, log) for name in "abc"}
    times = turns.take_turns(programs, turns=2, steps=4, warm_up=1)
    assert log == ["c4", "b4", "a4", "a4", "b4", "c4", "c4", "b4", "a4"]
    assert times == {name: [1.0, 1.0] for name in "abc"}


OURS = [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("peer", "its", "median", "verdict"),
    [
        (speed.Peer("horovod-expert", "gloo", 1.05), [1.06, 1.1, 1.2], 1.1, "met"),
        (speed.Peer("horovod-expert", "gloo", 1.05), [1.04, 1.1, 1.2], 1.1, "not told apart"),
        (speed.Peer("ddp-expert", "torchrun", 1.05), [0.9, 1.0, 1.04], 1.0, "not met"),
        (speed.Peer("none", "torchrun", 1.25), [0.8, 0.8, 1.0], 1.25, "met"),
        (speed.Peer("none", "torchrun", 1.25), [0.8, 0.5, 0.8], 1.25, "not told apart"),
        (speed.Peer("none", "torchrun", 1.25), [0.5, 0.5, 0.5], 2.0, "not met"),
    ],
)
def test_an_aim_is_met_where_the_whole_interval_is(
    peer: speed.Peer, its: Sequence[float], median: float, verdict: str
) -> None:
    """Over a peer count our images per second, over the limit the time that we take longer."""
    found = speed._beside(peer, [{"ours": OURS, peer.name: its}])
    assert found["median"] == pytest.approx(median)
    assert found["verdict"] == verdict


def test_every_network_is_compared_with_experts_and_the_limit() -> None:
    """No claim of speed is made beside programs that leave out what an expert would do."""
    for series in speed.BY_EXPERTS:
        programs = [peer.program for peer in series.peers]
        assert all(program.endswith("-expert") or program == "none" for program in programs)
        if series.launcher == "gloo":
            assert programs == ["horovod-expert", "ddp-expert", "none"]
    assert {series.network for series in speed.BY_EXPERTS} == {"convnet", "resnet18", "resnet50", "mobilenet", "vgg11"}


def test_the_limit_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of `none` takes its steps where the other rank is not, with images that are not those of the other."""
    monkeypatch.setattr(bare, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(bare, "share_cores", lambda ranks: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    Path("allowed").write_text("1000000")  # steps need not wait for their turn
    trained = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        torch.manual_seed(0)
        network = networks.convnet(10)
        steps = bare.none(network, 8, 30)
        for _ in range(2):
            next(steps)
        trained.append(torch.cat([weight.detach().flatten() for weight in network.parameters()]))
    assert not torch.equal(*trained)


def test_the_pages_say_what_the_records_say() -> None:
    """docs/benchmarks.md and the README's figures of speed are those of the records in benchmarks/records."""
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "python -m benchmarks.page writes them again"
    assert page.README.read_text(encoding="utf-8") == page.readme(), "python -m benchmarks.page writes them again"
    record = json.loads((RECORDS / "speed.json").read_text())
    assert page.claims(record) in page.README.read_text(encoding="utf-8")


@pytest.mark.parametrize(("starts", "verdict"), [(speed.STARTS - 1, ""), (speed.STARTS, "met")])
def test_a_record_of_few_starts_is_called_a_first_look(starts: int, verdict: str) -> None:
    """The intervals of a few starts are shown with a warning, and decide about no aim."""
    ratio = {"median": 1.1, "interval": [1.08, 1.2], "ratios_of_starts": [1.1] * starts, "of": "images/s"}
    series = {"network": "vgg11", "launcher": "gloo", "beside": {"ddp": {**ratio, "aim": "a", "verdict": "met"}}}
    record = {"command": "c", "date": "d", "series": [series]}
    assert [row.verdict for row in page.rows_of("speed", record)] == [verdict]
    assert ("first look" in page.claims(record)) == (verdict == "")

"""The roll call before the rendezvous over Gloo: missing ranks; facts that differ."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat

import pytest
from horovod.runner.http.http_server import KVStoreHandler, RendezvousServer

from hvd_train.errors import RankLost
from hvd_train.launch import client, roll_call

NEW = {"torch": "2.15.0"}


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Return the environment of rank 0 of 3; all calls of a test are the same roll call."""
    monkeypatch.setattr(KVStoreHandler, "longest_wait", 0.05)
    monkeypatch.setattr(roll_call, "_calls", repeat(0))
    monkeypatch.setattr(roll_call, "_FIRST_NOTICE_S", 0.2)
    server = RendezvousServer()
    place = {client.ADDRESS: "127.0.0.1", client.PORT: str(server.start())}
    yield {**place, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "3", roll_call.PATIENCE: "1"}
    server.stop()


@pytest.mark.parametrize(
    ("facts_of_ranks", "line"),
    [
        ([NEW] * 3, None),
        (
            [NEW, {"torch": "2.14.0"}, NEW],
            (
                "the ranks differ in torch: 2.15.0 on rank 0, rank 2; 2.14.0 on rank 1; "
                "set up the same on all"
            ),
        ),
        (
            [{"--seed": "0"}, {}],
            (
                "the ranks differ in --seed: 0 on rank 0; nothing on rank 1; start all of them "
                "with the same arguments"
            ),
        ),
    ],
)
def test_other_versions_or_settings_are_named(
    facts_of_ranks: Sequence[Mapping[str, str]], line: str | None
) -> None:
    facts = [{"who": f"rank {rank}", **facts} for rank, facts in enumerate(facts_of_ranks)]
    assert roll_call.disagreement(facts) == line


def test_a_missing_rank_is_named(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 prints notices while it waits; another rank says that rank 0 is missing."""
    client.put(environ, "hvd_train.started/2", "h7")
    with pytest.raises(RankLost, match=r"^rank 0 \(not started\) did not come within 1 s"):
        roll_call.call({**environ, "HOROVOD_RANK": "1"})
    assert capsys.readouterr().err == ""
    with pytest.raises(RankLost, match=r"^rank 2 on h7 did not come within 1 s: look at"):
        roll_call.call(environ)
    assert re.fullmatch(
        r"(hvd-train: waiting for rank 2 on h7 \([01] s\)\n)+", capsys.readouterr().err
    )


def test_a_launcher_that_is_gone_is_one_line(environ: dict[str, str]) -> None:
    with pytest.raises(RankLost, match="the launcher cannot be reached"):
        roll_call.call({**environ, client.PORT: "1"})

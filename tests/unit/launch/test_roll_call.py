"""The roll call before the rendezvous over Gloo: missing and differing ranks."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from hvd_train.errors import HvdTrainError, RankLost
from hvd_train.launch import roll_call


class Board:
    """A store in this process; `wait` is called in place of each wait for texts."""

    def __init__(self, wait: Callable[[], None] = lambda: time.sleep(0.001)) -> None:
        self._wait, self._texts = wait, dict[tuple[str, int], str]()

    def put(self, scope: str, rank: int, text: str) -> None:
        self._texts[scope, rank] = text

    def get(self, scope: str, rank: int) -> str | None:
        return self._texts.get((scope, rank))

    def wait_for(self, scope: str, ranks: int) -> list[str] | None:
        self._wait()
        texts = [self.get(scope, rank) for rank in range(ranks)]
        return None if None in texts else texts


@pytest.fixture(autouse=True)
def one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls of a test are the same roll call, and no rank prints a notice."""
    monkeypatch.setattr(roll_call, "_calls", type("Always", (), {"__next__": lambda _: 0})())
    monkeypatch.setattr(roll_call, "_FIRST_NOTICE_S", 1000.0)


@pytest.fixture
def wait_a_second(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that moves the clock on by a second."""
    now = [0.0]
    monkeypatch.setattr(roll_call, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(roll_call, "_FIRST_NOTICE_S", 15.0)
    return lambda: now.__setitem__(0, now[0] + 1.0)


def call(facts_of_ranks: Sequence[Mapping[str, str]]) -> tuple[list[str], dict[int, str]]:
    printed, shared, size = dict[int, str](), Board(), len(facts_of_ranks)

    def one(rank: int) -> str:
        try:
            roll_call.call(shared, rank, size, facts_of_ranks[rank], {}, lambda text: printed.__setitem__(rank, text))
        except HvdTrainError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(one, range(size))), printed


def test_other_versions_or_settings_stop_all_ranks() -> None:
    assert call([{"torch": "2.15.0"}] * 3) == (["", "", ""], {})
    results, printed = call([{"torch": "2.15.0"}, {"torch": "2.14.0"}, {"torch": "2.15.0"}])
    assert len(set(results)) == 1
    assert list(printed) == [0]
    expected = (
        r"the ranks differ in torch: 2.15.0 on \S+ \(ranks 0, 2\); 2.14.0 on \S+ \(rank 1\); set up the same on all"
    )
    assert re.fullmatch(f"UsageError: {expected}", results[0])
    results, _ = call([{"--seed": "0"}, {"--seed": "1"}])
    assert all(result.endswith("start all of them with the same arguments") for result in results)


def test_a_missing_rank_is_named(wait_a_second: Callable[[], None]) -> None:
    store, printed = Board(wait_a_second), list[str]()
    store.put("started", 3, "h7")
    store.put("here.0", 1, "{}")
    environ = {roll_call.PATIENCE: "40"}
    missing = "rank 2 (process not started yet), rank 3 on h7"
    with pytest.raises(RankLost, match=f"^{re.escape(missing)} did not come within 41 s: look at") as lost:
        roll_call.call(store, 0, 4, {}, environ, printed.append)
    assert printed == [f"waiting for {missing} (16 s)", f"waiting for {missing} (31 s)", str(lost.value)]
    with pytest.raises(RankLost, match=f"^{re.escape(missing)} did not come"):
        roll_call.call(store, 1, 4, {}, environ)


def test_a_missing_rank_0_is_an_error_on_all_others(wait_a_second: Callable[[], None]) -> None:
    printed = list[int]()
    for rank in (1, 2):
        with pytest.raises(RankLost, match=r"^rank 0 \(process not started yet\) did not come within 601 s"):
            roll_call.call(Board(wait_a_second), rank, 3, {}, {}, lambda _, rank=rank: printed.append(rank))
    assert set(printed) == {1}


def test_a_launcher_that_is_gone_is_one_line() -> None:
    environ = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1", "HOROVOD_RANK": "0"}
    store = roll_call.store(environ)
    assert store is not None
    with pytest.raises(RankLost, match="the launcher cannot be reached"):
        roll_call.call(store, 0, 2, {}, environ)

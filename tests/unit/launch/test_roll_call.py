"""The roll call before ranks meet: who is missing, and who is not the same."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvd_train import run
from hvd_train.config import Config
from hvd_train.errors import HvdTrainError, RankLost, UsageError
from hvd_train.launch import roll_call


class Blackboard:
    """A board in memory."""

    def __init__(self) -> None:
        self.written: dict[str, str] = {}
        self._lock = threading.Lock()

    def put(self, name: str, text: str) -> None:
        with self._lock:
            self.written[name] = text

    def get(self, name: str, wait_s: int = 0) -> str | None:
        with self._lock:
            return self.written.get(name)


@pytest.fixture(autouse=True)
def one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads of a test are ranks of the same, first call, and patience is short."""
    monkeypatch.setattr(roll_call, "_calls", type("Always", (), {"__next__": lambda _: 0})())
    monkeypatch.setattr(roll_call, "_POLL_S", 0.001)
    monkeypatch.setattr(roll_call, "_FIRST_NOTICE_S", 0.02)


def call(of_ranks: Mapping[int, Mapping[str, str]], size: int, **environ: str) -> tuple[list[str], dict[int, str]]:
    """What each rank that comes gets (empty: it may go on), in order, and what was said while they waited."""
    said: dict[int, str] = {}

    def one(rank: int) -> str:
        try:
            roll_call.call(board, rank, size, of_ranks[rank], environ, lambda text: said.__setitem__(rank, text))
        except HvdTrainError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    board = Blackboard()
    with ThreadPoolExecutor(len(of_ranks)) as ranks:
        return list(ranks.map(one, of_ranks)), said


def test_ranks_that_are_the_same_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, and nothing is said, however busy the machine is."""
    monkeypatch.setattr(roll_call, "_FIRST_NOTICE_S", 60.0)
    assert call({rank: {"torch": "2.15.0"} for rank in range(3)}, 3) == (["", "", ""], {})


def test_other_versions_stop_all() -> None:
    """Every rank learns who has what."""
    versions = {0: {"torch": "2.15.0"}, 1: {"torch": "2.14.0"}, 2: {"torch": "2.15.0"}}
    results, said = call(versions, 3)
    assert len(set(results)) == 1
    assert list(said) == [0]
    assert results[0].startswith(f"{UsageError.__name__}: the ranks differ in torch: 2.15.0 on ")
    assert "(ranks 0, 2); 2.14.0 on " in results[0]
    assert results[0].endswith("(rank 1); set up the same on all")


def test_other_settings_stop_all() -> None:
    """The flag is named, and that the command lines differ."""
    results, _ = call({0: {"--seed": "0"}, 1: {"--seed": "1"}}, 2)
    assert all("the ranks differ in --seed: 0 on" in result for result in results)
    assert all(result.endswith("start all of them with the same arguments") for result in results)


def test_a_rank_that_does_not_come_is_named() -> None:
    """By number and host, with whether it has started at all, as an error on all others."""
    patience = {roll_call.PATIENCE: "0.1", roll_call.HOSTS: "h1:2,h2:1"}
    results, _ = call({0: {}, 1: {}}, 3, **patience)
    assert results[0].startswith(
        f"{RankLost.__name__}: rank 2 on h2 (nothing heard of it) did not come within 0.1 s: look at"
    )
    assert results[1] == results[0]


def test_a_rank_that_is_late_is_named_meanwhile() -> None:
    """Who waits learns for whom, and goes on when it comes."""
    board, said = Blackboard(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        board.put("here.0.1", '{"host": "h2"}')

    roll_call.call(board, 0, 2, {}, {}, say)
    assert said == ["waiting for rank 1 (nothing heard of it) (0 s)"]


def test_rank_0_is_waited_for_by_rank_1() -> None:
    """It cannot say itself that it is not there."""
    results, said = call({1: {}, 2: {}}, 3, **{roll_call.PATIENCE: "0.1"})
    assert all(
        result.startswith(f"{RankLost.__name__}: rank 0 (nothing heard of it) did not come within")
        for result in results
    )
    assert list(said) == [1]


def test_a_rank_that_has_started_is_not_called_dead() -> None:
    """It imports; its host is known by itself."""
    board = Blackboard()
    board.put("started.1", "h7")
    with pytest.raises(RankLost, match=r"^rank 1 on h7 did not come"):
        roll_call.call(board, 0, 2, {}, {roll_call.PATIENCE: "0.05"})


def test_a_launcher_that_is_gone() -> None:
    """One line, not a traceback of urllib's."""
    nobody = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1", "HOROVOD_RANK": "0"}
    board = roll_call.store(nobody)
    assert board is not None
    roll_call.started(nobody)
    with pytest.raises(RankLost, match="the launcher cannot be reached"):
        roll_call.call(board, 0, 2, {}, nobody)


def test_elastic_ranks_are_not_called() -> None:
    """They come and go; the driver knows who is there."""
    environ = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "h1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1", "HOROVOD_RANK": "0"}
    assert roll_call.store({**environ, "HOROVOD_ELASTIC": "1"}) is None
    assert roll_call.store({}) is None


def test_a_time_that_is_none() -> None:
    """One line that names the variable."""
    with pytest.raises(UsageError, match=r"HVD_TRAIN_START_TIMEOUT_SECONDS is '10m'; it must be a number of seconds"):
        roll_call.call(Blackboard(), 0, 1, {}, {roll_call.PATIENCE: "10m"})


@pytest.mark.parametrize("name", sorted(run.OF_EACH_HOST))
def test_what_hosts_may_have_of_their_own_is_a_setting(name: str) -> None:
    """A name that is none would hide nothing, and one that is new would stop jobs that are right."""
    assert name in Config().settings()
    assert f"--{name.replace('_', '-')}" not in run.same_everywhere(Config())


@pytest.mark.parametrize(("rank", "host"), [(0, "a"), (1, "a"), (2, "b"), (3, None)])
def test_the_host_of_a_rank(rank: int, host: str | None) -> None:
    """Ranks fill the slots of hosts in their order."""
    assert roll_call.host_of(rank, "a:2,b:1") == host


def test_a_worker_is_like_the_job_it_joins() -> None:
    """The first difference, with both sides and what to do; hosts alone may differ."""
    job = {"host": "h1", "torch": "2.15", "--epochs": "5"}
    assert roll_call.difference_from_job(job, {**job, "host": "h2"}) is None
    assert roll_call.difference_from_job(job, {**job, "host": "h2", "torch": "2.14"}) == (
        "h2 differs from the job in torch: 2.14 there, 2.15 on h1; set up the same on all"
    )
    assert roll_call.difference_from_job(job, {"host": "h2", "torch": "2.15"}) == (
        "h2 differs from the job in --epochs: nothing there, 5 on h1; start all of them with the same arguments"
    )

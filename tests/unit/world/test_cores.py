"""How the ranks of a host share its cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvd_train.world import control_groups, cores
from hvd_train.world.cores import Cores, share


def bound(*numbers: int, host: str = "a") -> Cores:
    """A rank that may use these cores of a host."""
    return Cores(host, numbers)


@pytest.mark.parametrize(
    ("of_ranks", "shares"),
    [
        pytest.param([bound(*range(12))] * 4, [3, 3, 3, 3], id="all may use the same"),
        pytest.param([bound(*range(n, n + 12)) for n in (0, 12, 24, 36)], [12] * 4, id="each is bound to its own"),
        pytest.param([bound(*range(8)), bound(*range(4, 8)), bound(8)], [6, 2, 1], id="some overlap"),
        pytest.param([bound(0, 1)] * 5, [1] * 5, id="more ranks than cores"),
        pytest.param([bound(*range(6)), bound(*range(6), host="b")], [6, 6], id="on two hosts"),
        pytest.param([bound(0, 1, 2)] * 3 + [bound(1, 2, 3, 4)], [1, 1, 1, 2], id="thirds and quarters"),
    ],
)
def test_a_core_is_shared_by_the_ranks_that_may_use_it(of_ranks: list[Cores], shares: list[int]) -> None:
    """Whoever has cores of its own has all of them, and parts of cores add up."""
    assert [share(own, of_ranks) for own in of_ranks] == shares


def test_the_time_in_line_for_a_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel's second number, in nanoseconds; 0 where it tells none, as without that part of /proc."""
    assert 0 <= cores.queued_s() <= cores.queued_s()
    file = tmp_path / "schedstat"
    monkeypatch.setattr(cores, "_SCHEDULED", str(file))
    assert cores.queued_s() == 0
    for text, expected in (("71 2500000000 3\n", 2.5), ("", 0), ("nonsense here", 0)):
        file.write_text(text)
        assert cores.queued_s() == expected


def test_a_quota_is_shared_by_the_ranks_of_its_group() -> None:
    """A rank computes with no more threads than its container may run at a time."""
    inside, outside = Cores("a", tuple(range(16)), 4.0, 77), Cores("a", tuple(range(16)))
    assert [share(own, [inside, inside, outside, outside]) for own in (inside, outside)] == [2, 4]
    small = Cores("a", tuple(range(16)), 0.5, 78)
    assert share(small, [small]) == 1


@pytest.mark.parametrize(
    ("own_group", "files", "quota"),
    [
        ("0::/\n", {"": "max 100000\n"}, None),
        ("0::/\n", {"": "250000 100000\n"}, 2.5),
        ("0::/job/step\n", {"": "800000 100000\n", "job": "300000 100000\n", "job/step": "max 100000\n"}, 3.0),
        ("1:name=systemd:/x\n", {}, None),
    ],
)
def test_the_tightest_limit_of_the_groups_around_a_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_group: str, files: dict[str, str], quota: float | None
) -> None:
    """Be it a container's, or that of a job and its steps; without limits there is none."""
    (tmp_path / "own").write_text(own_group)
    for folder, text in files.items():
        (tmp_path / "groups" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / folder / "cpu.max").write_text(text)
    monkeypatch.setattr(control_groups, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(control_groups, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 1})
    found = cores.of_this_process()
    assert (found.numbers, found.quota) == ((1, 3), quota)
    assert (found.group != 0) is (quota is not None)

"""What is made of ranks that are wrong again and again."""

from __future__ import annotations

import pytest

from hvd_train.errors import HostUntrusted, ReplicasDiffer
from hvd_train.suspicions import Difference, Suspicions

HOSTS = ("a", "a", "b", "c")


def judged(suspicions: Suspicions, odd: tuple[int, ...], verified: int, own: str = "a", elastic: bool = False) -> None:
    """Note that these ranks were wrong, and raise what comes of it on a rank of host `own`."""
    found = Difference("ranks differ", odd)
    suspicions.note(found, verified, HOSTS)
    suspicions.raise_if_hopeless(found, own, HOSTS, may_leave=elastic)


@pytest.mark.parametrize("odd", [[(0,), (1,), (0,)], [(), (), ()]])
def test_the_third_time_of_a_host_ends_the_job(odd: list[tuple[int, ...]]) -> None:
    """Whichever of its ranks it is, and however long it takes; or the third time that nobody knows who it is."""
    suspicions = Suspicions()
    judged(suspicions, odd[0], 100)
    judged(suspicions, odd[1], 20_000)
    with pytest.raises(ReplicasDiffer, match="third time"):
        judged(suspicions, odd[2], 3_000_000)


def test_once_on_each_host_is_chance() -> None:
    """Where training got on in between; without that it is the program."""
    suspicions = Suspicions()
    for number, odd in enumerate([(0,), (2,), (3,)]):
        judged(suspicions, odd, 10 * number)
    suspicions = Suspicions()
    judged(suspicions, (0,), 10)
    judged(suspicions, (2,), 10)
    with pytest.raises(ReplicasDiffer, match="third time"):
        judged(suspicions, (3,), 10)


def test_an_elastic_job_leaves_a_host_out_that_is_wrong_twice() -> None:
    """Its own ranks end; the others go on, also the third time that one of its ranks is wrong before it has left."""
    suspicions = {host: Suspicions() for host in "abc"}
    for host, of_host in suspicions.items():
        judged(of_host, (2,), 10, host, elastic=True)
    for host in "ac":
        judged(suspicions[host], (2,), 20, host, elastic=True)
        judged(suspicions[host], (2,), 30, host, elastic=True)
    with pytest.raises(HostUntrusted, match="host b was wrong before, and is left out"):
        judged(suspicions["b"], (2,), 20, "b", elastic=True)


def test_the_only_host_cannot_be_left_out() -> None:
    """The third time ends the job, as where it is not elastic."""
    suspicions, found = Suspicions(), Difference("ranks differ", (0,))
    for verified in (10, 20):
        suspicions.note(found, verified, ("a", "a"))
        suspicions.raise_if_hopeless(found, "a", ("a", "a"), may_leave=True)
    suspicions.note(found, 30, ("a", "a"))
    with pytest.raises(ReplicasDiffer, match="third time"):
        suspicions.raise_if_hopeless(found, "a", ("a", "a"), may_leave=True)

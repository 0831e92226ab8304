"""Devices whose arithmetic is checked before they train."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hvd_train.errors import RankDiffers, RankLost
from hvd_train.world import known_answer
from tests.support.elastic import ONE, THREE, TWO, run_elastic
from tests.support.runs import RUN, small_config, trained
from tests.support.worlds import run_ranks

CPU = torch.device("cpu")
Threads = set[threading.Thread]


@pytest.mark.parametrize(("dtype", "largest", "right"), known_answer.ANSWERS)
def test_the_answers_are_those_of_exact_arithmetic(
    dtype: torch.dtype, largest: int, right: str
) -> None:
    """Also with inexact modes that the program has set."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert known_answer.digest(CPU, dtype, largest) == right
    found = known_answer.computed(CPU, dtype, largest)
    exact = known_answer.computed(CPU, torch.float64, largest)
    assert all(torch.equal(one.double(), other) for one, other in zip(found, exact, strict=True))


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """The threads in which torch's convolution makes one number wrong."""
    found = set()

    def conv2d(*given, **options):
        result = torch.conv2d(*given, **options)
        if threading.current_thread() in found:
            result = result.index_add(3, torch.tensor([2]), torch.ones(8, 16, 8, 1))
        return result

    monkeypatch.setattr(known_answer, "functional", SimpleNamespace(conv2d=conv2d))
    return found


RIGHT = known_answer.ANSWERS[0][2]


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ([RIGHT, "other", RIGHT], [1]),
        ([RIGHT, "other", "other"], [1, 2]),
        (["other", "another", "other"], [1]),  # a library of this kind rounds
        (["other", "another"], []),  # nobody can say who is wrong
        (["other"], []),
    ],
)
def test_devices_of_one_kind_are_compared(answers: list[str], wrong: list[int]) -> None:
    """Another kind of device may round in another way."""
    assert known_answer.wrong_ranks(["A"] * len(answers), answers) == wrong
    devices = ["B", *["A"] * len(answers), "B"]
    found = known_answer.wrong_ranks(devices, ["rounded", *answers, "rounded"])
    assert found == [1 + rank for rank in wrong]


@pytest.fixture(params=["alone", "compared"])
def _found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each rank judge itself, or compare the ranks, as on GPUs."""
    if request.param == "compared":
        monkeypatch.setattr(known_answer, "check", lambda *_: None)


@pytest.mark.usefixtures("_found")
def test_a_rank_that_computes_wrongly_is_refused_with_its_host(
    wrong: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before it writes; --recheck-steps 0 trains without a check."""
    monkeypatch.setenv("HOROVOD_HOSTNAME", "h2")

    def body(world, **settings):
        if world.place.rank == 1:
            wrong.add(threading.current_thread())
        trained(world, small_config(epochs=1, **settings))

    with pytest.raises((RankDiffers, RankLost), match=r"^h2 computes wrongly"):
        run_ranks(3, body)
    assert not RUN.exists()
    run_ranks(3, lambda world: body(world, recheck_steps=0))
    assert RUN.exists()


@pytest.mark.usefixtures("_found")
def test_an_elastic_job_continues_without_a_host_that_computes_wrongly(
    wrong: Threads,
) -> None:
    def body(world):
        worker = world._job.roster.worker(world._number)
        if worker is not None and worker.host == "h2":
            wrong.add(threading.current_thread())
        return trained(world, small_config(epochs=1, output_dir=Path("run")))

    job = run_elastic(body, dict((ONE, TWO, THREE)), first=2)
    assert job.finish.exit_code == 0
    assert {worker.host for worker in job.roster.world} == {"h1", "h3"}

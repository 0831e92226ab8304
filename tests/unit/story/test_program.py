"""Several trainings in one program."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.utils.data import Subset
from typing_extensions import override

from hvd_train import checkpoint
from hvd_train.errors import RankLost, UsageError
from hvd_train.result import Result, Stopped
from hvd_train.run import evaluate, train
from hvd_train.run_files.ledger import audit
from hvd_train.session import Session
from hvd_train.state import to_host
from hvd_train.world.world import LocalWorld, World
from tests.support import programs, runs
from tests.support.elastic import TOLERANCE, TWO, ElasticThreadWorld, Kill, run_elastic
from tests.support.faults import full_disk
from tests.support.programs import digits, measure, momentum, network, take
from tests.support.runs import Weights, largest_difference, small_config
from tests.support.worlds import DEADLINE_S, StoppingWorld, run_ranks

T = TypeVar("T")
FOLDS = ("first", "second", "third")
Outcome = list[tuple[Weights, dict[str, float], int]]


def folds(
    world: World, at: Callable[[str, int], None] = lambda *_: None, **changes: Any
) -> Outcome:
    """Return the weights, scores and steps of each fold, and let `at` know of
    each step that is trained.
    """
    found = Outcome()
    data = digits(runs.NUM_SAMPLES, "train")
    for number, name in enumerate(FOLDS):
        model = network()
        config = small_config(
            warmup_epochs=0.0, learning_rate=0.1, epochs=1, ledger=True, **changes
        )
        others = [sample for sample in range(len(data)) if sample % 3 != number]
        with Session(
            model, momentum(model), Subset(data, others), config=config, name=name, world=world
        ) as session:
            for epoch in session.epochs():
                for step in epoch:
                    at(name, step.number)
                    take(step, model)
                scores = session.evaluate(digits(runs.NUM_VAL, "val"), measure).figures
                session.keep_best(scores["right"])
        assert session.result.finished
        found.append((to_host(model.state_dict()), dict(scores), session.result.steps))
    return found


def equal(found: Outcome, expected: Outcome, allowed: float = 0.0) -> None:
    for (weights, scores, steps), (of_expected, figures, number) in zip(
        found, expected, strict=True
    ):
        assert steps == number
        assert largest_difference(weights, of_expected) <= allowed
        assert scores == pytest.approx(figures, abs=max(allowed, 1e-12))


def test_each_training_of_a_program_has_its_own_run() -> None:
    alone = folds(LocalWorld(), output_dir=Path("alone"))
    assert [steps for _, _, steps in alone] == [7, 7, 7]
    assert sorted(path.name for path in Path("alone").iterdir()) == sorted(FOLDS)
    assert largest_difference(alone[0][0], alone[1][0]) > 1e-3
    for found in run_ranks(2, lambda world: folds(world, output_dir=Path("two"))):
        assert isinstance(found, list)
        equal(found, alone, TOLERANCE)
    assert all(audit(Path("two", name)).steps == 7 for name in FOLDS)


@pytest.mark.parametrize("settings", [{"output_dir": Path("mine")}, {"output_dir": None}])
def test_a_program_resumes_in_the_training_that_was_stopped(settings: dict[str, Any]) -> None:
    """Finished trainings give their weights and scores without a step."""
    whole = folds(LocalWorld(), output_dir=Path("whole"))
    trained = list[tuple[str, int]]()
    with pytest.raises(Stopped):
        folds(StoppingWorld(18), **settings)
    equal(folds(LocalWorld(), lambda *step: trained.append(step), **settings), whole)
    assert trained == [("third", step) for step in range(5, 8)]
    if settings["output_dir"] is None:
        assert len([*Path("runs").iterdir()]) == 1
        folds(LocalWorld(), **settings)
        assert len([*Path("runs").iterdir()]) == 2, "a finished program starts again"


def test_a_newcomer_repeats_what_the_others_have_finished() -> None:
    """Without a step; then it joins the training of the others."""
    trained = list[tuple[str, int]]()

    def body(world: ElasticThreadWorld) -> Outcome:
        def at(name: str, step: int) -> None:
            trained.append((name, step))
            job = world._job
            if (name, step) == ("third", 5) and world.place.size == 1:
                with job.changed:
                    assert job.changed.wait_for(
                        lambda: job.roster.requested() == "change", DEADLINE_S
                    )

        return folds(world, at, output_dir=Path("elastic"))

    job = run_elastic(body, dict((("h1", 1), TWO)), [Kill(17, 1)], first=2)
    alone = folds(LocalWorld(), output_dir=Path("alone"))
    assert job.sizes[-1] == 2, "no newcomer has joined"
    for found in job.results:
        equal(found, alone, TOLERANCE)
    assert [trained.count((name, 2)) for name in FOLDS] == [2, 2, 2]
    assert all(audit(Path("elastic", name)).faults == () for name in FOLDS)


class Deaf(ElasticThreadWorld):
    """A rank 1 that does not hear that the summary of the first training is on disk."""

    heard = True

    @override
    def broadcast(self, value: T, root: int) -> T:
        result = super().broadcast(value, root)
        if result is True and self.place.rank == 1 and self.heard:
            self.heard = False
            raise RankLost("not heard")
        return result


def test_a_rank_that_does_not_hear_of_the_end_of_a_training_comes_to_the_next() -> None:
    job = run_elastic(
        lambda world: folds(world, output_dir=Path("deaf")),
        dict((("h1", 1), TWO)),
        first=2,
        kind=Deaf,
    )
    alone = folds(LocalWorld(), output_dir=Path("alone"))
    assert len(job.results) == 2
    for found in job.results:
        equal(found, alone, TOLERANCE)


def small(name: str = "", **changes: Any) -> Result:
    return train(
        small_config(epochs=1, **changes), model=runs.convnet, data=runs.few_digits, name=name
    )


def test_a_second_training_needs_a_name_or_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    small()
    with pytest.raises(UsageError, match=r"trained before.*Session\(\.\.\., name='part2'\)"):
        small()
    small()  # an error ends the program
    assert small("more").run_dir == Path("run/more")
    with pytest.raises(UsageError, match="two trainings of this program have the name 'more'"):
        small("more")
    small(output_dir=None)
    assert small(output_dir=None, seed=1).run_dir != Path("run")
    with pytest.raises(UsageError, match="trained before"):
        small(output_dir=None)
    small()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    small()


@pytest.mark.parametrize("name", ["a/b", "..", "checkpoints", "a b", "_"])
def test_a_name_is_the_name_of_a_folder(name: str) -> None:
    with pytest.raises(UsageError, match="take"):
        small(name)


def test_a_run_is_evaluated_in_the_program_that_trained_it() -> None:
    result = small("one")
    assert (
        evaluate(Path("run/one"), model=runs.convnet, data=runs.few_digits).figures == result.best
    )
    assert small("two", weights="run/one/model-best.pt").steps == result.steps


def test_named_trainings_continue_those_of_another_folder() -> None:
    """`--resume FOLDER` is the folder of a program."""
    small("one", output_dir=Path("first"))
    assert small("one", output_dir=Path("second"), resume="first", seed=0).steps == 10
    with pytest.raises(UsageError, match="--resume first/two: no such file"):
        small("two", output_dir=Path("second"), resume="first")


def test_a_stop_ends_the_trainings_that_follow() -> None:
    world = StoppingWorld(3)
    result = train(
        small_config(), model=runs.convnet, data=runs.few_digits, name="one", world=world
    )
    assert not result.finished
    with pytest.raises(Stopped):
        train(small_config(), model=runs.convnet, data=runs.few_digits, name="two", world=world)
    assert not Path("run/two").exists()


def test_a_session_without_room_for_its_final_files_ends_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the exit code of `hvd-train train`; with room again the same program finishes."""
    with monkeypatch.context() as disk:
        disk.setattr(checkpoint, "write_into", full_disk)
        with pytest.raises(Stopped) as ended:
            folds(LocalWorld(), output_dir=Path("mine"))
    assert ended.value.code == 74
    assert [path.name for path in Path("mine").iterdir()] == ["first"]
    assert len(folds(LocalWorld(), output_dir=Path("mine"))) == len(FOLDS)


def test_a_model_is_trained_again_with_another_optimizer() -> None:
    model = programs.linear()
    world = LocalWorld()
    first, last = (
        programs.played(
            world,
            programs.plain,
            make=lambda: model,
            optimizer_of=lambda model, rate=rate: torch.optim.SGD(model.parameters(), lr=rate),
            name=name,
        )[0]
        for name, rate in (("pretrain", 0.1), ("finetune", 0.01))
    )
    assert 1e-4 < largest_difference(first, last) < 0.5


def started_as(
    monkeypatch: pytest.MonkeyPatch, path: str, world: World | None = None, **changes: Any
) -> Result:
    """Train as the script at `path` does, in a program of its own."""
    monkeypatch.setattr(sys, "argv", [path])
    script = sys.modules["__main__"]
    monkeypatch.setattr(script, "__file__", path, raising=False)
    monkeypatch.setattr(script, "__spec__", None)
    world = world or LocalWorld()
    return train(
        small_config(epochs=1, **changes), model=runs.convnet, data=runs.few_digits, world=world
    )


def test_a_script_continues_its_own_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal settings, too."""
    paths = "base.py", "other.py", "sub/base.py"
    begun = [
        started_as(monkeypatch, path, StoppingWorld(3), output_dir=None).run_dir for path in paths
    ]
    assert len({*begun}) == 3
    for folder, path in zip(
        begun, ("./base.py", str(Path.cwd() / "other.py"), "sub/base.py"), strict=True
    ):
        assert folder is not None
        assert started_as(monkeypatch, path, StoppingWorld(1), output_dir=None).run_dir == folder
        for other in {*paths} - {str(Path(path).absolute().relative_to(Path.cwd()))}:
            with pytest.raises(
                UsageError, match=r"other settings \(recipe: (sub\.)?\w+, not (sub\.)?\w+\)"
            ):
                started_as(monkeypatch, other, output_dir=folder)


def test_another_host_may_have_a_script_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for host in ("one", "two"):
        folder = tmp_path / host
        folder.mkdir()
        monkeypatch.chdir(folder)
        stopped = started_as(
            monkeypatch, str(folder / "mine.py"), StoppingWorld(3), output_dir=tmp_path / "run"
        )
    assert stopped.steps > 3

"""Several trainings in one program."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.support.elastic import ONE, TOLERANCE, TWO, ElasticThreadWorld, Kill, run_elastic
from tests.support.faults import full_disk
from tests.support.programs import digits, measure, momentum, network, take
from tests.support.runs import Weights, largest_difference, small_config
from tests.support.worlds import DEADLINE_S, StoppingWorld, run_ranks

FOLDS = ("first", "second", "third")
Outcome = list[tuple[Weights, dict[str, float], int]]


def folds(
    world: World, at: Callable[[str, int], None] = lambda *_: None, **changes: Any
) -> Outcome:
    """Return the weights, scores and steps of each fold, and let `at` know of
    each step that is trained.
    """
    found = []
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


def check_equal(found: Any, expected: Outcome, allowed: float = 0.0) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert largest_difference(mine[0], theirs[0]) <= allowed
        assert mine[1] == pytest.approx(theirs[1], abs=max(allowed, 1e-12))
        assert mine[2] == theirs[2]


def test_each_training_of_a_program_has_its_own_run() -> None:
    alone = folds(LocalWorld(), output_dir=Path("alone"))
    assert [steps for _, _, steps in alone] == [7, 7, 7]
    assert sorted(path.name for path in Path("alone").iterdir()) == sorted(FOLDS)
    assert largest_difference(alone[0][0], alone[1][0]) > 1e-3
    for found in run_ranks(2, lambda world: folds(world, output_dir=Path("two"))):
        check_equal(found, alone, TOLERANCE)
    assert all(audit(Path("two", name)).steps == 7 for name in FOLDS)


@pytest.mark.parametrize("output_dir", [Path("mine"), None])
def test_a_program_resumes_in_the_training_that_was_stopped(output_dir: Path | None) -> None:
    """Finished trainings give their weights and scores without a step."""
    whole = folds(LocalWorld(), output_dir=Path("whole"))
    trained = []
    with pytest.raises(Stopped):
        folds(StoppingWorld(18), output_dir=output_dir)
    found = folds(LocalWorld(), lambda *step: trained.append(step), output_dir=output_dir)
    check_equal(found, whole)
    assert trained == [("third", step) for step in range(5, 8)]
    if output_dir is None:
        assert len([*Path("runs").iterdir()]) == 1
        folds(LocalWorld(), output_dir=None)
        assert len([*Path("runs").iterdir()]) == 2, "a finished program starts again"


def test_a_newcomer_repeats_what_the_others_have_finished() -> None:
    """Without a step; then it joins the training of the others."""
    trained = []

    def body(world):
        def at(name, step):
            trained.append((name, step))
            job = world._job
            if (name, step) == ("third", 5) and world.place.size == 1:
                with job.changed:
                    assert job.changed.wait_for(
                        lambda: job.roster.requested() == "change", DEADLINE_S
                    )

        return folds(world, at, output_dir=Path("elastic"))

    job = run_elastic(body, dict([ONE, TWO]), [Kill(17, 1)], first=2)
    alone = folds(LocalWorld(), output_dir=Path("alone"))
    assert job.sizes[-1] == 2, "no newcomer has joined"
    for found in job.results:
        check_equal(found, alone, TOLERANCE)
    assert [trained.count((name, 2)) for name in FOLDS] == [2, 2, 2]
    assert all(audit(Path("elastic", name)).faults == () for name in FOLDS)


class Deaf(ElasticThreadWorld):
    """A rank 1 that does not hear that the summary of the first training is on disk."""

    heard = True

    @override
    def broadcast(self, value: Any, root: int) -> Any:
        result = super().broadcast(value, root)
        if result is True and self.place.rank == 1 and self.heard:
            self.heard = False
            raise RankLost("not heard")
        return result


def test_a_rank_that_does_not_hear_of_the_end_of_a_training_comes_to_the_next() -> None:
    deaf = Path("deaf")
    job = run_elastic(
        lambda world: folds(world, output_dir=deaf), dict([ONE, TWO]), first=2, kind=Deaf
    )
    alone = folds(LocalWorld(), output_dir=Path("alone"))
    assert len(job.results) == 2
    for found in job.results:
        check_equal(found, alone, TOLERANCE)


def small(name: str = "", world: World | None = None, **changes: Any) -> Result:
    config = small_config(epochs=1, **changes)
    return train(config, model=runs.convnet, data=runs.few_digits, name=name, world=world)


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


@pytest.mark.parametrize("name", ["a/b", "..", "checkpoints"])
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
    assert not small("one", world).finished
    with pytest.raises(Stopped):
        small("two", world)
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

    def trained(name, rate):
        return programs.played(
            LocalWorld(),
            programs.plain,
            make=lambda: model,
            optimizer_of=lambda model: torch.optim.SGD(model.parameters(), lr=rate),
            name=name,
        )[0]

    first = trained("pretrain", 0.1)
    assert 1e-4 < largest_difference(first, trained("finetune", 0.01)) < 0.5


def started_as(
    monkeypatch: pytest.MonkeyPatch, path: str | Path, world: World, output_dir: Path | None = None
) -> Result:
    """Train as the script at `path` does, in a program of its own."""
    monkeypatch.setattr(sys, "argv", [str(path)])
    script = sys.modules["__main__"]
    monkeypatch.setattr(script, "__file__", str(path), raising=False)
    monkeypatch.setattr(script, "__spec__", None)
    return small(world=world, output_dir=output_dir)


def test_a_script_continues_its_own_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal settings, too."""
    scripts = {
        "base.py": "./base.py",
        "other.py": Path.cwd() / "other.py",
        "sub/base.py": "sub/base.py",
    }
    begun = {path: started_as(monkeypatch, path, StoppingWorld(3)).run_dir for path in scripts}
    assert len({*begun.values()}) == 3
    for path, folder in begun.items():
        assert started_as(monkeypatch, scripts[path], StoppingWorld(1)).run_dir == folder
        for other in scripts.keys() - {path}:
            with pytest.raises(
                UsageError, match=r"other settings \(recipe: (sub\.)?\w+, not (sub\.)?\w+\)"
            ):
                started_as(monkeypatch, other, LocalWorld(), folder)


def test_another_host_may_have_a_script_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for host in ("one", "two"):
        folder = tmp_path / host
        folder.mkdir()
        monkeypatch.chdir(folder)
        stopped = started_as(monkeypatch, folder / "mine.py", StoppingWorld(3), tmp_path / "run")
    assert stopped.steps > 3

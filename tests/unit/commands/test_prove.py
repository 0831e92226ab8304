"""What `hvd-train prove` says about runs that differ."""

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from hvd_train import cli, proof
from hvd_train.proof import IN_ANOTHER_ORDER, Run, cause, depends_on_order, differences
from hvd_train.world.world import LocalWorld, World
from tests.support import runs
from tests.support.run_folders import event, write
from tests.support.runs import small_config, trained
from tests.support.worlds import run_ranks


def run(name: str, world: World | None = None, make: Any = runs.convnet, **settings: Any) -> Run:
    config = small_config(**{"output_dir": Path(name), "ledger": True, "epochs": 1, **settings})
    trained(world or LocalWorld(), config, make)
    return Run(Path(name), [])


def test_the_first_step_and_tensor_that_differ_are_named() -> None:
    assert differences(run("alone"), run("again"), 0.0) == ([], "")
    whole = run("whole", schedule="step", decay_epochs=(), epochs=2)
    other = run("other", schedule="step", decay_epochs=(1,), decay_factor=0.5, epochs=2)
    (step, tensor), _ = differences(whole, other, 1e-5)
    assert step.startswith("step 11 is the first that differs, in learning_rate, by ")
    assert tensor.startswith("the first tensor that differs is model/0.weight, by ")


@pytest.mark.parametrize(("reduction", "is_exact"), [("fast", False), ("exact", True)])
def test_runs_with_exact_sums_must_have_the_same_bits(reduction: str, is_exact: bool) -> None:
    alone = run("alone", reduction=reduction)
    other = run_ranks(2, lambda world: run("other", world, reduction=reduction))[0]
    assert alone.is_exact is is_exact
    assert (differences(alone, other, 0.0)[0] == []) is is_exact


def test_a_missing_step_is_a_difference() -> None:
    found, _ = differences(run("alone", epochs=2), run("other", epochs=1), 1e-5)
    assert found[0] == "it took 10 steps, not 20"


@pytest.mark.parametrize(
    ("differs", "advises"), [("3-ranks", True), ("stopped-and-resumed", False)]
)
def test_exact_sums_are_advised_if_rounding_may_explain_a_difference(
    differs: str,
    advises: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def compared(alone: Run, other: Run, *_: object) -> tuple[list[str], str]:
        return (["step 3 differs"] if other.folder.name == differs else [], "")

    monkeypatch.setattr(Run, "complete", lambda run, *_: run.folder.mkdir())
    monkeypatch.setattr(Run, "newcomers", 1)
    monkeypatch.setattr(Run, "is_exact", False)
    monkeypatch.setattr(proof, "depends_on_order", lambda *_: "")
    monkeypatch.setattr(proof, "differences", compared)
    assert cli.run(["prove", "--tolerance", "1e-5", "python", "mine.py"]) == 1
    assert ("add --reduction exact" in capsys.readouterr().out) is advises


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"batch_size": 8, "global_batch_size": None}, "add --global-batch-size 16"),
        ({"sync_batch_norm": True}, "leave out --sync-batch-norm"),
    ],
)
def test_settings_that_depend_on_the_number_of_ranks_are_named(
    settings: dict[str, Any],
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def complete(alone: Run, *_: object) -> None:
        run(str(alone.folder), **settings)

    monkeypatch.setattr(Run, "complete", complete)
    assert cli.run(["prove", "--np", "2", "python", "mine.py"]) == 2
    assert advice in capsys.readouterr().err


class Attention(nn.Module):
    """Attention over the rows of an image; a bias of the keys changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.flatten(1).view(-1, 8, 8)
        weights = (self.query(rows) @ self.key(rows).mT).softmax(-1)
        return self.head((weights @ rows).flatten(1))


def test_a_bias_without_effect_differs_by_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is rounding, from which Adam makes whole steps."""
    tolerance = 1e-6  # the rounding of some processors is no larger
    settings = {
        "make": lambda num_classes: Attention(),
        "optimizer": "adam",
        "learning_rate": 0.003,
        "warmup_epochs": 0.0,
    }
    alone = run("alone", **settings)
    three = run_ranks(3, lambda world: run("three", world, **settings))[0]
    other = run("other", **{**settings, "learning_rate": 0.0031})
    for name, value in IN_ANOTHER_ORDER.items():
        monkeypatch.setenv(name, value)
    control = run("control", **settings)
    assert depends_on_order(alone, control, tolerance) == ""
    found, note = differences(alone, three, tolerance, control)
    assert (found, "bias" in note) == ([], True)
    found, _ = differences(alone, three, tolerance)
    assert found[0].startswith("the first tensor that differs is model/")
    found, _ = differences(alone, other, tolerance, control)
    assert "step 1 is the first that differs, in learning_rate" in found[0]


def test_a_first_step_that_depends_on_the_order_is_no_rounding() -> None:
    found = depends_on_order(run("alone"), run("control", seed=1), 1e-5)
    assert found.startswith("step 1 is the first that differs, in ")


def test_newcomers_of_a_run_are_counted() -> None:
    events = [event("world", 0, came=came) for came in ([], ["h (process 1)"])]
    write(Path("run"), events)
    assert Run(Path("run"), []).newcomers == 1


def test_each_training_of_a_program_is_compared() -> None:
    for name in ("alone/one", "alone/three", "alone/two", "other/one"):
        run(name)
    run("other/two", learning_rate=0.06)
    alone = Run(Path("alone"), [])
    assert (alone.trainings, alone.num_steps) == (["one", "three", "two"], 30)
    found, _ = differences(alone, Run(Path("other"), []), 1e-5)
    assert found[0] == "there is no training three"
    assert found[1].startswith("two: step 1 is the first that differs")


RANK_LOST = "hvd-train: another rank ended or cannot be reached (x); step 4 is committed\n"
TRACEBACK = 'Traceback (most recent call last):\n  File "mine.py", line 3, in <module>\n'


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (
            f"{RANK_LOST}[1]<stderr>:{TRACEBACK}[1]<stderr>:ValueError: my mistake\n",
            "ValueError: my mistake",
        ),
        (
            f"{TRACEBACK}mine.Wrong.ItsError\n\nDuring handling of ...\n{TRACEBACK}KeyError: 'x'\n",
            "mine.Wrong.ItsError",
        ),
        (
            f"hvd-train: --workers 8 is for each rank\nhvd-train: type less\n{RANK_LOST}",
            "type less",
        ),
        (
            "hvd-train: worker h[0]: no such loss\nhvd-train: 3 workers in a row (see above)\n",
            "worker h[0]: no such loss",
        ),
        (
            "Exception ignored in: <x>\nhvd-train: worker h[1] ended with exit code 137\n",
            "worker h[1] ended with exit",
        ),
        ("step 1\nSegmentation fault\n", "Segmentation fault"),
        ("", "it printed nothing"),
    ],
)
def test_the_reason_of_a_failed_run_is_its_first_error(output: str, says: str) -> None:
    assert cause(output).startswith(says)


def test_the_log_of_the_failed_attempt_counts() -> None:
    """A run that was stopped is run again, into the same log."""
    script = "import sys, pathlib; p = pathlib.Path('once'); again = p.exists(); p.touch(); "
    script += "raise ValueError('second') if again else sys.exit(print('KeyError: first') or 143)"
    failed = Run(Path("run"), [sys.executable, "-c", script]).complete()
    assert failed is not None
    assert "exit code 1: ValueError: second (see run.log)" in failed

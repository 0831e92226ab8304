"""What `hvd-train prove` says about runs that differ."""

from pathlib import Path
from typing import Any

from hvd_train.proof import Run, differences
from hvd_train.world.world import LocalWorld
from tests.support.runs import small_config, trained


def run(name: str, **settings: Any) -> Run:
    trained(LocalWorld(), small_config(output_dir=Path(name), ledger=True, log_steps=1, **settings))
    return Run(Path(name), [])


def test_the_first_step_and_tensor_that_differ_are_named() -> None:
    alone = run("alone")
    assert differences(alone, run("again"), 0.0) == []
    other = run("other", schedule="step", decay_epochs=(1,), decay_factor=0.5, epochs=2)
    step, tensor = differences(run("whole", schedule="step", decay_epochs=(), epochs=2), other, 1e-5)
    assert step.startswith("step 11 is the first that differs, in learning_rate, by ")
    assert tensor.startswith("the first tensor that differs is model/0.weight, by ")


def test_differences_below_the_tolerance_do_not_count() -> None:
    alone, other = run("alone", learning_rate=0.01), run("other", learning_rate=0.01 * (1 + 1e-6))
    assert differences(alone, other, 1e-5) == []
    assert len(differences(alone, other, 0.0)) == 2

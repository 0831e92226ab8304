"""The answers of steps in the ledger, steps that are trained again, and runs that are compared."""

from pathlib import Path

from hvd_train.run_files.ledger import answers_in
from hvd_train.world.world import LocalWorld
from tests.support.runs import RUN, small_config, trained
from tests.support.worlds import StoppingWorld

CONFIG = small_config(epochs=2, ledger=True)
STEPS = 20


def test_a_run_that_stopped_has_the_answers_of_one_that_did_not() -> None:
    trained(LocalWorld(), CONFIG)
    whole = answers_in(RUN)
    assert [*whole] == [*range(1, STEPS + 1)]
    stopped = CONFIG.replace(output_dir=Path("stopped"))
    trained(StoppingWorld(14), stopped)
    assert max(answers_in(Path("stopped"))) < STEPS
    trained(LocalWorld(), stopped)
    assert answers_in(Path("stopped")) == whole

"""Figures as people read them: which one is better, how they are written, and what a file may say about them."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from hvd_train.errors import UsageError
from hvd_train.progress.figures import LOSS, OF_CLASSES, Figure, Shown, by_name, check, mean, read_all
from hvd_train.result import Result
from hvd_train.run_files.records import EpochRecord, StepRecord

ACCURACY = Shown("accuracy", "accuracy", "higher", ".1%")


def test_better_is_higher_or_lower() -> None:
    """An equal value is not better; any number is better than none, and none is better than nothing."""
    assert [ACCURACY.is_better(value, 0.5) for value in (0.6, 0.5, 0.4, math.nan)] == [True, False, False, False]
    assert [LOSS.is_better(value, 0.5) for value in (0.6, 0.5, 0.4, math.nan)] == [False, False, True, False]
    for figure in (ACCURACY, LOSS):
        assert figure.is_better(0.1, math.nan)
        assert not figure.is_better(math.nan, math.nan)


def test_an_aim_is_reached_by_its_own_value() -> None:
    """From the side on which the figure is better; never by what is no number."""
    assert [ACCURACY.reached(value, 0.5) for value in (0.6, 0.5, 0.4, math.nan)] == [True, True, False, False]
    assert [LOSS.reached(value, 0.5) for value in (0.6, 0.5, 0.4, math.nan)] == [False, True, True, False]


def test_a_mean_is_over_samples_and_over_what_each_of_them_has() -> None:
    """Three samples with two numbers each: the sum of all six over six."""
    figure = mean("size", "mean size", "lower", ".1f")
    assert figure.value({"size": np.array([6.0, 12.0])}, 3) == 3.0
    assert figure.value({"size": np.array(6.0)}, 3) == 2.0
    assert (figure.title, figure.written(2.0), figure.in_training) == ("mean size", "2.0", True)
    assert (mean("size").title, mean("size").better, mean("size").written(2.0)) == ("size", None, "2.0000")


def test_what_a_run_writes_about_its_figures_is_read_again() -> None:
    """Through JSON, with all that people see."""
    figures = (LOSS, ACCURACY, mean("bias", form=",.3e"))
    read = read_all(json.loads(json.dumps([figure.plain() for figure in figures])))
    assert [figure.plain() for figure in read] == [figure.plain() for figure in figures]


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        "loss",
        [1],
        [{}],
        [{"name": "loss"}],
        [{**LOSS.plain(), "form": "{0.__class__}"}],
        [{**LOSS.plain(), "form": ".999999999f"}],
        [{**LOSS.plain(), "form": "999999999"}],
        [{**LOSS.plain(), "form": ".4f and more"}],
        [{**LOSS.plain(), "better": "best"}],
        [{**LOSS.plain(), "title": "a" * 65}],
        [{**LOSS.plain(), "name": 3}],
        [LOSS.plain(), {**LOSS.plain(), "form": ""}],
    ],
    ids=str,
)
def test_a_file_that_says_nothing_usable_is_one_of_classification(damaged: object) -> None:
    """As all runs were before there were other tasks; a form cannot take memory or look into objects."""
    assert read_all(damaged) == OF_CLASSES


def test_a_file_cannot_have_any_number_of_figures() -> None:
    """The first 64 are read."""
    assert len(read_all([LOSS.plain()] * 1000)) == 64


def test_the_figure_that_decides_is_found_by_name() -> None:
    """Where it is not there, or has no order, it is top-1 as in runs of old, else the first that has an order."""
    figures = (LOSS, mean("bias"), ACCURACY)
    assert by_name(figures, "accuracy") == ACCURACY
    assert by_name(figures, "bias") == by_name(figures, "gone") == by_name(figures, None) == LOSS
    assert by_name(OF_CLASSES, None).name == by_name(OF_CLASSES, "gone").name == "top1"
    assert by_name((mean("bias"),), "bias").name == "loss"


def test_no_figure_has_a_name_that_records_use() -> None:
    """Steps, epochs and the summary hold figures beside their own facts: no fact is overwritten."""
    facts = {field.name for record in (StepRecord, EpochRecord, Result) for field in dataclasses.fields(record)}
    facts -= {"scores", "best", "test", "headline", "unit", "peaks"}  # which are written under other names
    for name in (*facts, "time", "kind", "count", "per_class", "recipe", "torch", "val_loss", "test_a", "best_a"):
        with pytest.raises(UsageError, match=f"is called '{name}', which records use already: choose another name"):
            check([LOSS, mean(name)])
    for name in ("", "mean error", "a-b", "3d"):
        with pytest.raises(UsageError, match="write it as a name in Python"):
            check([mean(name)])
    with pytest.raises(UsageError, match="two figures of the task are called 'a': each needs a name of its own"):
        check([LOSS, mean("a"), Figure("a", "another")])
    check([LOSS, mean("a"), mean("value"), mean("best"), mean("größe")])


@pytest.mark.parametrize(
    ("figure", "says"),
    [
        (Figure("a", "a", "max"), "better='max' must be 'higher', 'lower' or None"),  # type: ignore[arg-type]
        (Figure("a", "a", form=".3"), "form='.3' must be as in '.4f'"),
        (Figure("a", "a", form="9999999.2f"), "must be as in"),
        (Figure("a", "a" * 65), "its title must be a text of at most 64 letters"),
    ],
)
def test_a_figure_that_readers_of_runs_would_not_take_is_refused(figure: Figure, says: str) -> None:
    """A run whose figures cannot be read again would be shown with those of classification."""
    with pytest.raises(UsageError, match=re.escape(says)):
        check([figure])
    assert read_all([LOSS.plain(), figure.plain()]) == OF_CLASSES

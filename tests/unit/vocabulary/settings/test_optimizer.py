"""Settings of the optimizer: what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.refused import assert_refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.0}, "--learning-rate is 0; it must be a number above 0"),
        ({"learning_rate": float("nan")}, "--learning-rate is nan"),
        ({"learning_rate": float("inf")}, "--learning-rate is inf"),
        ({"lr_base_batch": 0}, "--lr-base-batch is 0"),
        ({"weight_decay": -0.1}, "--weight-decay is -0.1"),
        ({"weight_decay": float("nan")}, "--weight-decay is nan"),
        ({"momentum": 1.0}, "--momentum is 1; it must be at least 0 and below 1"),
        ({"label_smoothing": 1.0}, "--label-smoothing is 1"),
        ({"clip_norm": 0.0}, "--clip-norm is 0"),
        ({"nesterov": True, "momentum": 0.0}, "--nesterov needs --optimizer sgd or lars with a momentum above 0"),
        ({"nesterov": True, "optimizer": "adam"}, "--nesterov needs --optimizer sgd"),
        ({"nesterov": True, "optimizer": "mine:Own"}, "or type --no-nesterov"),
        ({"optimizer": "adamm"}, "unknown optimizer 'adamm'; did you mean 'adam'?"),
        ({"optimizer_args": ("eps",)}, "--optimizer-args eps: it must be name=value"),
        ({"reduction": "adasum", "clip_norm": 1.0}, "--clip-norm does not go with --reduction adasum"),
        ({"reduction": "adasum", "gradient_predivide_factor": 2.0}, "--gradient-predivide-factor does not go with"),
    ],
)
def test_values_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    """The message names the flag, the value and what it must be."""
    assert_refused(changes, message)

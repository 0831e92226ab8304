"""Perplexity by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hvd_train.tasks.language_model import language_model
from tests.support.task_figures import in_training, scored

pytestmark = pytest.mark.numeric


def test_perplexity_by_hand() -> None:
    """Two tokens, one at 1/2 and one at 1/8, have perplexity 4: e to the mean loss; the largest logit says which."""
    logits = torch.tensor([[[0.5, 0.25, 0.25], [0.125, 0.5, 0.375]]]).log()
    targets = torch.tensor([[0, 0]])
    for figures in (scored(language_model(3), logits, targets).values, in_training(language_model(3), logits, targets)):
        assert figures["perplexity"] == pytest.approx(4.0)
        assert figures["loss"] == pytest.approx(math.log(4))
        assert figures["token_accuracy"] == 0.5


def test_the_mean_comes_before_the_exponential(draw: torch.Generator) -> None:
    """Perplexity is no mean of batches' perplexities, and a hopeless model's is a number still."""
    logits, targets = torch.randn(9, 4, 5, generator=draw), torch.randint(5, (9, 4), generator=draw)
    expected = math.exp(F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten()).item())
    assert scored(language_model(5), logits, targets)["perplexity"] == pytest.approx(expected, rel=1e-6)
    hopeless = F.one_hot((targets + 1) % 5, 5) * 1e6
    assert math.isfinite(scored(language_model(5), hopeless, targets)["perplexity"])

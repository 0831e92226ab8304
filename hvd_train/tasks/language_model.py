"""A causal language model: at each place, the token that comes next. Cross entropy over tokens, and perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hvd_train.progress.figures import Figure
from hvd_train.tasks.task import Task

_LARGEST = 700.0  # of what math.exp takes


def language_model(vocabulary: int) -> Task:
    """Return the task of predicting the next token: logits [n, length, vocabulary], targets int64 [n, length].

    A model may return an object with the logits as `.logits`, as those of Hugging Face do. The loss of a sample is the
    mean over its tokens. Figures: perplexity, which is e to the mean loss, and the share of tokens predicted right.
    """

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        logits = _logits(outputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).mean(1)

    def measures(outputs: Any, targets: Tensor) -> Mapping[str, Tensor]:
        return {"right_tokens": (_logits(outputs).argmax(-1) == targets).float().mean(1)}

    return Task(
        loss=loss,
        measures=measures,
        figures=(
            Figure(
                "perplexity",
                "perplexity",
                "lower",
                ".4g",
                value=lambda s, n: math.exp(min(float(s["loss"]) / n, _LARGEST)),
            ),
            Figure("token_accuracy", "tokens right", "higher", ".2%", value=lambda s, n: float(s["right_tokens"]) / n),
        ),
        best="perplexity",
        refusal=lambda outputs, targets: (
            None
            if getattr(_logits(outputs), "shape", None) == (*targets.shape, vocabulary)
            else f"it must return logits [n, {', '.join(map(str, targets.shape[1:]))}, {vocabulary}]"
        ),
        outputs=vocabulary,
    )


def _logits(outputs: Any) -> Tensor:
    logits: Tensor = getattr(outputs, "logits", outputs)
    return logits

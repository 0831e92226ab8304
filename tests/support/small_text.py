"""A small language model and its text, for real jobs of ranks that die."""

from __future__ import annotations

from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.other_data import python_docs
from hvd_train.network.small import SmallTransformer
from hvd_train.settings.data import DataConfig

SAMPLES, LENGTH = 1437, 16  # as many samples as the digits have, so that an epoch has as many steps


class Transformer(SmallTransformer):
    """A causal transformer 32 numbers wide."""

    width, heads, blocks = 32, 2, 1


def model(vocabulary: int) -> Transformer:
    """Return the network."""
    return Transformer(vocabulary)


def text(config: DataConfig) -> DataSet:
    """Return the first samples of Python's documentation, of 16 bytes each."""
    whole = python_docs(DataConfig(data="python-docs", sequence_length=LENGTH), 0)
    assert isinstance(whole.train, Arrays)
    train = Arrays(whole.train.inputs[:SAMPLES], whole.train.targets[:SAMPLES], SAMPLES)
    val = Arrays(whole.train.inputs[-200:], whole.train.targets[-200:], 200)
    return DataSet(train, val, vocabulary=256)

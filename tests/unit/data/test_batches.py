"""The iterator that prepares batches ahead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hvd_train.data.batches import Ahead, Batch
from hvd_train.errors import UsageError
from tests.support.batches import batch_of


def test_a_batch_prepared_ahead_comes_in_its_turn() -> None:
    """All batches come once and in their order, prepared early or not; the error of one is raised in its turn."""

    def batches() -> Iterator[Batch]:
        yield from (batch_of(size, 1) for size in (1, 2, 3))
        raise UsageError("cannot read the fourth")

    marks: list[str] = []
    ahead, sizes = Ahead(batches(), marks.append), []
    with pytest.raises(UsageError, match="the fourth"):
        for batch in ahead:
            sizes.append(batch.size)
            if batch.size > 1:
                ahead.prepare()
    assert sizes == [1, 2, 3]
    assert marks == ["data"] * 4
    ended = Ahead(iter([batch_of(1, 1)]), marks.append)
    assert [(batch.size, ended.prepare()) for batch in ended] == [(1, None)]  # type: ignore[func-returns-value]

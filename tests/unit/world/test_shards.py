"""How parameters are cut into shards and chunks: all of them, once, and in equal parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvd_train.world.shards import Chunk, Layout, Part, elements_of

SIZES = st.lists(st.integers(0, 200), min_size=1, max_size=8)


@given(sizes=SIZES, count=st.integers(1, 5), most=st.integers(1, 60), data=st.data())
def test_every_element_is_in_one_shard(sizes: list[int], count: int, most: int, data: st.DataObject) -> None:
    """Each trained element once, none of the others, shards that differ by one element, and no chunk too large."""
    trained = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
    shards = Layout(sizes).shards(trained, count, most)
    found = [
        (part.parameter, element)
        for shard in shards
        for chunk in shard
        for part in chunk.parts
        for element in range(part.begin, part.end)
    ]
    assert found == [(parameter, element) for parameter in trained for element in range(sizes[parameter])]
    lengths = [sum(part.end - part.begin for chunk in shard for part in chunk.parts) for shard in shards]
    assert len(shards) == count
    assert max(lengths) - min(lengths) <= 1
    chunks = [chunk for shard in shards for chunk in shard]
    assert all(0 < sum(part.end - part.begin for part in chunk.parts) <= most for chunk in chunks)


@given(sizes=SIZES, count=st.integers(1, 5), most=st.integers(1, 60))
def test_spans_cover_the_parts_and_no_other_parameter(sizes: list[int], count: int, most: int) -> None:
    """What is copied as one span is what is updated, and the gaps that no parameter has."""
    layout = Layout(sizes)
    owner = dict[int, tuple[int, int]]()
    for parameter, (begin, size) in enumerate(zip(layout.begins, sizes, strict=True)):
        assert begin % 16 == 0
        owner |= {begin + element: (parameter, element) for element in range(size)}
    for shard in layout.shards(range(len(sizes)), count, most):
        for chunk in shard:
            covered = [owner.get(place) for begin, end in chunk.spans for place in range(begin, end)]
            parts = [(part.parameter, element) for part in chunk.parts for element in range(part.begin, part.end)]
            assert [place for place in covered if place is not None] == parts


def test_frozen_parameters_are_left_out() -> None:
    """Parameters that lie one behind the other are one span; a frozen one between them makes two."""
    layout = Layout([10, 40, 20])
    assert layout.begins == (0, 16, 64)
    assert layout.num_elements == 96
    assert layout.shards([0, 1], 1, 100) == [[Chunk((Part(0, 0, 10), Part(1, 0, 40)), ((0, 56),))]]
    assert layout.shards([0, 2], 1, 100) == [[Chunk((Part(0, 0, 10), Part(2, 0, 20)), ((0, 10), (64, 84)))]]


def test_the_elements_of_a_shard() -> None:
    """A parameter that two shards share has its first elements in the one and the rest in the other."""
    one, other = Layout([10, 30]).shards([0, 1], 2, 7)
    assert elements_of(one) == {0: (0, 10), 1: (0, 10)}
    assert elements_of(other) == {1: (10, 30)}

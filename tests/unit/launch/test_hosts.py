"""Host files and lists: reading, and refusing wrong ones."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_train.errors import UsageError
from hvd_train.launch import hosts
from hvd_train.launch.hosts import Host


def file(text: str) -> str:
    Path("hosts").write_text(text)
    return "hosts"


NAMES = st.from_regex(r"[a-z0-9][a-zA-Z0-9_.-]{0,8}", fullmatch=True)
FORMS = [
    "{} slots={}",
    "{}:{}",
    "  {}:{}   # the old one",
    "{} slots = {} max_slots=8",
    "# two racks\n\n{} slots={}\r",
]


@settings(max_examples=25)
@given(
    st.dictionaries(NAMES, st.tuples(st.integers(1, 99), st.sampled_from(FORMS)), min_size=1), NAMES
)
def test_all_forms_of_a_line_are_read(listed: dict[str, tuple[int, str]], other: str) -> None:
    expected = tuple(Host(name, slots) for name, (slots, _) in listed.items())
    lines = [form.format(name, slots) for name, (slots, form) in listed.items()]
    assert hosts.named(file("\n".join(lines))) == expected
    assert hosts.parse(", ".join(map(str, expected))) == expected
    assert hosts.named(file(f"{other} max-slots=2")) == hosts.parse(other) == (Host(other, 1),)


@given(st.text("aB1-2:[], #=²\n", max_size=8))
def test_any_other_list_is_refused(text: str) -> None:
    """A host is never empty, twice there, or an option of ssh."""
    try:
        found = hosts.parse(text)
    except UsageError:
        return
    assert found
    assert len({host.name for host in found}) == len(found)
    assert all(re.fullmatch(r"[aB12][aB12-]*", host.name) and host.slots > 0 for host in found)


def test_a_host_that_is_there_twice_is_named() -> None:
    with pytest.raises(UsageError, match="hosts: a is there twice; add its slots up"):
        hosts.named(file("a slots=1\nb\na slots=2\n"))


def test_ranges_are_expanded() -> None:
    assert hosts.parse("n[08-10,12]:4,gpu1") == (
        *(Host(f"n{n}", 4) for n in ("08", "09", "10", "12")),
        Host("gpu1", 1),
    )
    assert hosts.parse("r[1-2]n[1-2]") == tuple(
        Host(f"r{r}n{n}", 1) for r in (1, 2) for n in (1, 2)
    )
    for wrong in ("h1,-oProxyCommand=x", "-[1-2]", "n[3-1]", "n[²]"):
        with pytest.raises(UsageError):
            hosts.parse(wrong)

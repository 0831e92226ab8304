"""Host files and lists: reading, and refusing wrong ones."""

from pathlib import Path

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import hosts
from hvd_train.launch.hosts import Host


def file(text: str) -> str:
    Path("hosts").write_text(text)
    return "hosts"


def test_all_forms_of_a_line_are_read() -> None:
    text = "# two racks\na slots=4\n\nb:2   # the old one\nc\nd slots = 3 max_slots=8\ne.example max-slots=2\r\n"
    expected = (Host("a", 4), Host("b", 2), Host("c", 1), Host("d", 3), Host("e.example", 1))
    assert hosts.named(file(text)) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a slots=1\nb 2\n", "hosts, line 2: 'b 2' is not of the form 'NAME slots=N'"),
        ("a slots=1\nb\na slots=2\n", "hosts: a is there twice; add its slots up"),
        ("a slots=0\n", "hosts: name hosts, one on each line"),
    ],
)
def test_a_wrong_line_is_named(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        hosts.named(file(text))


def test_lists_on_the_command_line_are_read() -> None:
    assert hosts.parse("h1:2,h2:3, h3") == (Host("h1", 2), Host("h2", 3), Host("h3", 1))
    assert hosts.parse("n[08-10,12]:4,gpu1") == (*(Host(f"n{n}", 4) for n in ("08", "09", "10", "12")), Host("gpu1", 1))
    assert hosts.parse("r[1-2]n[1-2]") == tuple(Host(f"r{r}n{n}", 1) for r in (1, 2) for n in (1, 2))
    for wrong in ("-G:2", "h1,-oProxyCommand=x", "-[1-2]", "", "a b", "n[3-1]", "n[²]", "h1,h1"):
        with pytest.raises(UsageError):
            hosts.parse(wrong)

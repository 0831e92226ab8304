"""The pages of reference name all that the commands take and the package offers."""

from __future__ import annotations

import re
import subprocess

import docs_reference
import pytest

import hvd_train
from hvd_train import recipes
from hvd_train.commands import bench
from hvd_train.commands.registry import COMMANDS
from hvd_train.commands.train import ALIASES
from hvd_train.errors import UsageError
from hvd_train.help_page import Flag


@pytest.fixture(scope="module")
def flags() -> str:
    """The page of commands and flags."""
    return docs_reference.flags()


def test_each_command_and_tool_has_its_part(flags: str) -> None:
    """A heading for each, in the order of the overview, and no title without flags below it."""
    headings = re.findall(r"^## hvd-train (.*)$", flags, re.MULTILINE)
    tools = [f"bench {tool}" for tool in bench.TOOLS]
    after = COMMANDS.index("bench") + 1
    assert headings == [*COMMANDS[:after], *tools, *COMMANDS[after:]]
    assert not re.search(r"^\*\*Flags\*\*\n\n(#|\Z)", flags, re.MULTILINE)


def test_each_setting_is_named_once_with_a_link_to_it(flags: str) -> None:
    """All settings of a run are flags of train, and what people of other trainers type for them stands beside."""
    train = flags.partition("## hvd-train train\n")[2].partition("\n## ")[0]
    entries = dict(re.findall(r"^(`-.*) \{#train--([a-z-]+)\}$", train, re.MULTILINE))
    names = {name: entry for entry, name in entries.items()}
    settings = {name.replace("_", "-") for name in recipes.digits().settings()}
    assert names.keys() - {"np", "hosts", "controller", "config"} == settings
    assert train.count("{#train--") == len(names)
    for alias, flag in ALIASES.items():
        assert f"`{alias}`" in names[flag[2:]]


def test_an_entry_has_the_type_in_words_the_default_and_the_meaning(flags: str) -> None:
    """`free` stands at what may change when a run goes on."""
    assert (
        "`--on-resize` *`global` or `per-worker`* {#train--on-resize}\n:   When workers come or go: keep the global "
        "batch, or the batch per worker (the learning rate follows). Default: `global`." in flags
    )
    assert "`--eval-batch-size` *a whole number* {#train--eval-batch-size}\n" in flags
    assert "`--log-steps` *a whole number, free* {#train--log-steps}\n" in flags
    assert "`--download`, `--no-download` *free* {#train--download}\n" in flags
    assert "Folder of the data; for `folder` it holds train/ and val/" in flags


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", ""),
        ("INT or none", "a whole number or `none`"),
        ("TEXT ...", "a text, or several"),
        ("N,N,...", "a whole number, or several"),
        ("INT ... or none", "a whole number or `none`, or several"),
        ("cpu|gpu", "`cpu` or `gpu`"),
        ("fp32|fp16|bf16", "`fp32`, `fp16` or `bf16`"),
    ],
)
def test_types_are_told_in_words(value: str, words: str) -> None:
    """What follows a flag, as one would say it."""
    assert docs_reference.kind(value) == words


def test_what_means_something_to_markdown_is_shown_as_it_is() -> None:
    """Stars and brackets of a text are no emphasis and no links; code stays code."""
    entry = docs_reference.entry("index", Flag(("DATA",), "", "train/*.tar, [n] and `a_*` or <b>"), free=False)
    assert entry == "`DATA`\n:   train/\\*.tar, \\[n] and `a_*` or \\<b>"


@pytest.mark.parametrize("name", ["train_local.sh", "discover_hosts.sh"])
def test_a_script_says_what_its_help_prints(name: str) -> None:
    """The page of scripts has the text of --help."""
    script = docs_reference.SCRIPTS / name
    done = subprocess.run(["bash", script, "--help"], capture_output=True, text=True, check=True, timeout=60)
    assert docs_reference.opening(script) == done.stdout.strip()
    assert f"## {name}\n\n```text\n{done.stdout.strip()}\n```" in docs_reference.scripts()


def test_each_script_is_there_and_nothing_of_slurm_s() -> None:
    """All that one starts, and no line of #SBATCH."""
    page = docs_reference.scripts()
    starts = {path.name for path in docs_reference.SCRIPTS.iterdir() if path.name.startswith("train_")}
    assert starts < set(re.findall(r"^## (.*)$", page, re.MULTILINE))
    assert "SBATCH --" not in page


def test_each_public_name_is_documented() -> None:
    """Those of `hvd_train`, the recipes, and the errors with their exit codes."""
    page = docs_reference.api()
    named = {name.rpartition(".")[2] for name in re.findall(r"^::: (.*)$", page, re.MULTILINE)}
    assert set(hvd_train.__all__) - {"__version__", "recipes"} <= named
    assert {make.__name__ for make in recipes.RECIPES.values()} <= named
    assert (
        f"::: hvd_train.errors.UsageError\n    options:\n      members: false\n\nExit code {UsageError.exit_code}."
        in page
    )

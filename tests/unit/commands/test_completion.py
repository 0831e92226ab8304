"""`hvd-train completion`: the words that the TAB key offers."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hvd_train.commands import tree
from hvd_train.config import Config
from tests.unit.commands.conftest import Command


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tr", "train"),
        ("train cifar10-resnet5", "cifar10-resnet50"),
        ("train digits --prec", "--precision"),
        ("train --precision ", "auto fp32 fp16 bf16"),
        ("evaluate --split t", "train test"),
        ("completion ", "--help bash zsh"),
        ("bench ", "--help throughput scaling"),
        ("sweep digits --ho", "--hosts"),
        ("report runs/", ""),  # files, by the shell
    ],
)
def test_bash_offers_words(typed: str, offered: str, command: Command) -> None:
    ask = (
        'source ./script; COMP_WORDS=(hvd-train "$@"); COMP_CWORD=$#; _hvd_train; '
        'echo "${COMPREPLY[*]}"'
    )
    Path("script").write_text(command("completion bash").out)
    line = ["bash", "--norc", "-c", ask, "bash", *typed.split(" ")]
    assert subprocess.check_output(line, text=True) == f"{offered}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_reads_its_script(shell: str, command: Command) -> None:
    """It has all commands and all settings of a run."""
    Path("script").write_text(text := command(f"completion {shell}").out)
    words = set(text.replace("'", " ").split())
    assert {f"--{name.replace('_', '-')}" for name in Config().settings()} < words
    assert set(tree.tree().commands) < words
    if shutil.which(shell):
        subprocess.run([shell, "-n", "script"], check=True)

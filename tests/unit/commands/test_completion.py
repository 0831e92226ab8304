"""`hvd-train completion`: the words that the TAB key offers."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hvd_train import cli
from hvd_train.commands import tree
from hvd_train.config import Config


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.run(["completion", shell]) == 0
    return capsys.readouterr().out


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
        ("bench scaling --mode ", "weak strong"),
        ("sweep digits --ho", "--hosts"),
        ("report runs/", ""),  # files, by the shell
    ],
)
def test_bash_offers_words(typed: str, offered: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("script").write_text(printed("bash", capsys))
    ask = (
        'source ./script; COMP_WORDS=(hvd-train "$@"); COMP_CWORD=$#; _hvd_train; '
        'echo "${COMPREPLY[*]}"'
    )
    line = ["bash", "--norc", "-c", ask, "bash", *typed.split(" ")]
    assert (
        subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout
        == f"{offered}\n"
    )


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_reads_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It has all commands and all settings of a run."""
    Path("script").write_text(text := printed(shell, capsys))
    words = set(text.replace("'", " ").split())
    assert {f"--{name.replace('_', '-')}" for name in Config().settings()} < words
    assert set(tree.tree().commands) < words
    if shutil.which(shell):
        subprocess.run([shell, "-n", "script"], check=True, timeout=60)

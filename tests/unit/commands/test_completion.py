"""What bash completes, asked of a real bash with the words that it would hand over."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from hvd_train import cli, recipes
from hvd_train.commands.completion import script
from hvd_train.commands.registry import COMMANDS

ZSH = shutil.which("zsh")


def completed(typed: str) -> list[str]:
    """Return what bash offers for the last word of what is typed; = is a word of its own, as in bash's own words."""
    words = typed.replace("=", " = ").split(" ")
    words = [word for word in words[:-1] if word] + words[-1:]
    ask = (
        f"COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}\n"
        f"_hvd_train {shlex.join(['hvd-train', words[-1], words[-2]])}\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-uc", script("bash") + "complete -p hvd-train >&2\n" + ask],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == "complete -o bashdefault -o default -F _hvd_train hvd-train\n"
    return done.stdout.split()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("hvd-train ", [*COMMANDS, "help"]),
        ("hvd-train e", ["evaluate", "export"]),
        ("hvd-train help tr", ["train"]),
        ("hvd-train bench ", ["throughput", "batch", "allreduce", "input", "scaling"]),
        ("hvd-train bench scaling --mo", ["--mode", "--model", "--momentum"]),
        ("hvd-train completion ", ["bash", "zsh"]),
        ("hvd-train train imagenet-", ["imagenet-resnet50", "imagenet-resnet50-modern"]),
        ("hvd-train train --recipe ", list(recipes.RECIPES)),
        ("hvd-train train digits --nest", ["--nesterov"]),
        ("hvd-train train digits --device ", ["auto", "cpu", "cuda"]),
        ("hvd-train train digits --device=", ["auto", "cpu", "cuda"]),
        ("hvd-train train digits --device=c", ["cpu", "cuda"]),
        ("hvd-train train --optimizer la", ["lars", "lamb"]),
        ("hvd-train train --data-dir ", []),
        ("hvd-train train --np", ["--np"]),
        ("hvd-train config --np", []),
        ("hvd-train sweep digits --workers-per-", ["--workers-per-run", "--workers-per-host"]),
        ("hvd-train watch ", []),
        ("hvd-train watch runs/a --o", ["--once"]),
        ("hvd-train hosts --to m", ["mpich"]),
    ],
)
def test_what_can_be_typed_is_offered(typed: str, offered: list[str]) -> None:
    """Commands, recipes, flags and choices; nothing where a path is wanted, which bash completes by itself."""
    assert completed(typed) == offered


def test_a_shell_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """By one line; a known one gets its script."""
    assert cli.run(["completion", "fish"]) == 2
    assert "it must be one of bash, zsh, not 'fish'" in capsys.readouterr().err
    assert cli.run(["completion", "zsh"]) == 0
    assert capsys.readouterr().out == script("zsh")


@pytest.mark.skipif(ZSH is None, reason="there is no zsh: apt install zsh")
def test_zsh_takes_the_script(tmp_path: Path) -> None:
    """It completes by the function of bash."""
    (tmp_path / "script").write_text(script("zsh"))
    ask = "source ./script; COMP_WORDS=(hvd-train e) COMP_CWORD=1; emulate ksh -c '_hvd_train hvd-train e hvd-train'; "
    done = subprocess.run(  # of the words zsh itself chooses those that begin as what is typed does
        [str(ZSH), "-fc", ask + "print -l $COMPREPLY; print $_comps[hvd-train]"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    *words, function = done.stdout.splitlines()
    assert {"evaluate", "export"} <= set(words), done.stderr
    assert function == "_bash_complete -o bashdefault -o default -F _hvd_train"

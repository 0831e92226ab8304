"""`hvd-train completion`: a script with which a shell completes commands, flags, their choices and recipes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from hvd_train import recipes
from hvd_train.commands import bench
from hvd_train.commands.registry import COMMANDS, command
from hvd_train.console import PROGRAM
from hvd_train.flags import parse_flags
from hvd_train.help_page import Flag, Page, page_of
from hvd_train.launch import start
from hvd_train.settings.optimizer import OPTIMIZERS
from hvd_train.settings.schedule import SCHEDULES

USAGE = """\
  completion bash|zsh      a script with which the shell completes what you type
"""
# What the types of these flags do not say. Names of models are left out: torchvision, which knows them, takes seconds.
_KNOWN = {"--recipe": tuple(recipes.RECIPES), "--optimizer": OPTIMIZERS, "--schedule": SCHEDULES}
SHELLS = ("bash", "zsh")
_OF_ZSH = """\
autoload -Uz compinit bashcompinit
(( $+functions[compdef] )) || compinit
bashcompinit
"""
_SCRIPT = """\
_hvd_train() {
  local word=$2 before=$3 prefix='' words=''
  local recipes='@RECIPES@'
  local settings='@SETTINGS@'
  # In bash the = of --flag=value is a word of its own, in zsh all of it is one.
  if [[ $word == '=' ]]; then word=''; fi
  if [[ $before == '=' ]]; then before=${COMP_WORDS[$COMP_CWORD - 2]}; fi
  if [[ $word == --*'='* ]]; then before=${word%%=*} prefix=${word%%=*}= word=${word#*=}; fi
  COMPREPLY=()
  case $before in
@VALUES@
    *)
      case $COMP_CWORD:${COMP_WORDS[1]}:${COMP_WORDS[2]-} in
@WORDS@
      esac
      ;;
  esac
  COMPREPLY=($(compgen -P "$prefix" -W "$words" -- "$word"))
}
complete -o bashdefault -o default -F _hvd_train @PROGRAM@
"""


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script with which the shell completes commands, flags, their choices and recipes."""

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """The shell."""


def run(arguments: list[str]) -> int:
    """Print the script and return 0. Raises UsageError for another shell."""
    options = parse_flags(CompletionOptions, arguments, f"{PROGRAM} completion")
    print(script(options.shell), end="")
    return 0


def page(arguments: list[str]) -> Page:
    """Return the help."""
    examples = (f"echo 'source <({PROGRAM} completion bash)' >> ~/.bashrc", f"source <({PROGRAM} completion zsh)")
    return page_of(CompletionOptions, "completion bash|zsh", examples, "bash|zsh")


def script(shell: str) -> str:
    """Return the script for `bash` or `zsh`, which runs that of bash. Where it has no word, they complete files."""
    pages = {f"{name}:*": command(name).page([]) for name in COMMANDS if name != "bench"}
    pages |= {f"bench:{name}": bench.page([name]) for name in bench.TOOLS}
    with_settings = ["train:*", *(typed for typed, help_page in pages.items() if help_page.takes_settings)]
    own = {typed: _flags(help_page) for typed, help_page in pages.items()}
    settings = [flag for flag in own["train:*"] if flag not in start.FLAGS]
    own["train:*"] = list(start.FLAGS)
    choices: dict[str, list[str]] = {}
    for flag in itertools.chain(settings, *own.values()):
        for name in flag.names if flag.value else ():
            choices.setdefault(name, []).extend(_KNOWN.get(name) or _choices(flag))
    of_files = " | ".join(name for name, found in choices.items() if not found)
    values = [f"{name}) words='{' '.join(dict.fromkeys(found))}' ;;" for name, found in choices.items() if found]
    by_place = [f"1:*) words='{' '.join(COMMANDS)} help' ;;", f"2:help:*) words='{' '.join(COMMANDS)}' ;;"]
    by_place += [f"2:bench:*) words='{' '.join(bench.TOOLS)}' ;;", f"2:completion:*) words='{' '.join(SHELLS)}' ;;"]
    for typed, flags in own.items():
        if typed in with_settings:
            first = 3 if typed.startswith("bench") else 2
            by_place.append(f'{first}:{typed}) words="$recipes {_names(flags)} $settings" ;;')
            by_place.append(f'*:{typed}) words="{_names(flags)} $settings" ;;')
        else:  # what it takes beside flags is a file or a run
            by_place.append(f"*:{typed}) if [[ $word == -* ]]; then words='{_names(flags)}'; fi ;;")
    parts = {
        "RECIPES": " ".join(recipes.RECIPES),
        "SETTINGS": _names(settings),
        "VALUES": "\n".join(f"    {branch}" for branch in [*values, f"{of_files}) ;;"]),
        "WORDS": "\n".join(f"        {branch}" for branch in by_place),
        "PROGRAM": PROGRAM,
    }
    text = re.sub("@([A-Z]+)@", lambda found: parts[found[1]], _SCRIPT)
    return (_OF_ZSH if shell == "zsh" else "") + text


def _flags(help_page: Page) -> list[Flag]:
    return [flag for section in help_page.sections for flag in section.flags if flag.names[0].startswith("-")]


def _names(flags: Iterable[Flag]) -> str:
    return " ".join(name for flag in flags for name in flag.names)


def _choices(flag: Flag) -> list[str]:
    """Return the words between which a flag chooses: three for `cpu|gpu or none`."""
    choices, *none = flag.value.split(" or ")
    return [*choices.split("|"), *none] if "|" in choices else []

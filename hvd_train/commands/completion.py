"""`hvd-train completion SHELL`: print a script for the TAB key, which holds all words."""

import importlib
import re
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from hvd_train import recipes
from hvd_train.commands import launch
from hvd_train.commands.names import COMMANDS
from hvd_train.config import GROUPS, Config
from hvd_train.console import PROGRAM
from hvd_train.errors import UsageError, unknown_name

_SHELLS = ("bash", "zsh", "fish")
_RECIPES = " ".join(recipes.RECIPES)


def completion(arguments: list[str]) -> int:
    """Print the script and return 0. Raises UsageError if no known shell is named."""
    install = f"`source <({PROGRAM} completion bash)` (or zsh), or in fish `{PROGRAM} completion fish | source`"
    if {"-h", "--help"} & set(arguments):
        print(f"Print a script for the TAB key. Type {install}, here or in the start-up file of the shell.")
        return 0
    if not arguments:
        raise UsageError(f"name the shell: type {install}")
    if arguments[0] not in _SHELLS:
        raise unknown_name("shell", arguments[0], _SHELLS)
    print(_fish() if arguments[0] == "fish" else _bash(zsh=arguments[0] == "zsh"))
    return 0


def _words(command: str) -> str:
    usage = COMMANDS[command][1]
    found = [*re.findall(r"--[a-z-]+|\b[a-z]{4,}\b|zsh", usage), *_flags(command), "--help"]
    if command == "launch":
        found += [word for action in launch.parser()._actions for word in action.option_strings]
    return " ".join([*([_RECIPES, "--config", "--recipe", "--try"] if "RECIPE" in usage else []), *found])


def _flags(command: str) -> dict[str, Any]:
    """Return the types of the flags of a command; a switch has two flags."""
    module, usage, _ = COMMANDS[command]
    options = getattr(importlib.import_module(f"hvd_train.commands.{module}"), f"{command.capitalize()}Options", None)
    found = dict[str, Any]()
    for cls in (Config, *GROUPS.values()) if "RECIPE" in usage else [options] if options else []:
        for name, kind in get_type_hints(cls, include_extras=True).items():
            if kind not in GROUPS.values() and get_origin(kind) is not Annotated:  # which are positional
                flag = name.replace("_", "-")
                found |= dict.fromkeys([f"--{flag}", f"--no-{flag}"] if kind is bool else [f"--{flag}"], kind)
    return found


def _values() -> dict[str, str]:
    """Return the values of each flag that takes one of a few words."""
    flags = {flag: kind for command in COMMANDS for flag, kind in _flags(command).items()}
    known = {flag: " ".join(get_args(kind)) for flag, kind in flags.items() if get_origin(kind) is Literal}
    return {**known, "--recipe": _RECIPES}


def _bash(*, zsh: bool) -> str:
    commands = "\n".join(f"    {name}) words='{_words(name)}' ;;" for name in COMMANDS)
    values = "\n".join(f"    {flag}) words='{words}' ;;" for flag, words in _values().items())
    begin = "autoload -Uz compinit bashcompinit; (( $+functions[compdef] )) || compinit; bashcompinit\n" if zsh else ""
    return f"""{begin}_hvd_train() {{
  local words=''
  case "${{COMP_WORDS[1]}}" in
{commands}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words='{" ".join(COMMANDS)} --help --version'; fi
  case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _hvd_train {PROGRAM}"""


def _fish() -> str:
    commands = f"complete -c {PROGRAM} -n __fish_use_subcommand -f -a '{' '.join(COMMANDS)}'"
    words = [f"complete -c {PROGRAM} -n '__fish_seen_subcommand_from {name}' -a '{_words(name)}'" for name in COMMANDS]
    before = "string match -q -- {} (commandline -opc)[-1]"
    values = [f"complete -c {PROGRAM} -n '{before.format(flag)}' -f -a '{words}'" for flag, words in _values().items()]
    return "\n".join([commands, *words, *values])

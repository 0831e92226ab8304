"""`hvd-train completion SHELL`: print a script for the TAB key, with the words that the helps of all commands have."""

import importlib
import re
from contextlib import redirect_stdout, suppress
from io import StringIO

from hvd_train import recipes
from hvd_train.commands.names import COMMANDS
from hvd_train.console import PROGRAM
from hvd_train.errors import UsageError, unknown_name

_SHELLS = ("bash", "zsh")
_RECIPES = " ".join(recipes.RECIPES)


def completion(arguments: list[str]) -> int:
    """Print the script and return 0. Raises UsageError if no known shell is named."""
    install = f"`source <({PROGRAM} completion bash)`, or zsh"
    if {"-h", "--help"} & set(arguments):
        print(f"Print a script for the TAB key. Type {install}, here or in the start-up file of the shell.")
        return 0
    if not arguments:
        raise UsageError(f"name the shell: type {install}")
    if arguments[0] not in _SHELLS:
        raise unknown_name("shell", arguments[0], _SHELLS)
    words = dict[str, list[str]]()
    values = {"--recipe": _RECIPES}
    for name, (_, usage, _) in COMMANDS.items():
        first = [word for word in usage.split()[0].split("|") if word.isalpha() and word.islower()]
        first += [_RECIPES] if "RECIPE" in usage else []
        text = f"{usage} {_help('train' if 'RECIPE' in usage else name)} --help"
        words[name] = [*first, *dict.fromkeys(re.findall(r"--[a-z][a-z-]*", text))]
        values |= {flag: known.replace(",", " ") for flag, known in re.findall(r"(--[a-z-]+) \{([\w,-]+)\}", text)}
    cases = "\n".join(f"    {name}) words='{' '.join(found)}' ;;" for name, found in words.items())
    known = "\n".join(f"    {flag}) words='{found}' ;;" for flag, found in values.items())
    print(f"""[ -z "$ZSH_VERSION" ] || {{ autoload -Uz compinit bashcompinit; compinit; bashcompinit; }}
_hvd_train() {{
  local words=''
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words='{" ".join(COMMANDS)} --help --version'; fi
  case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{known}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _hvd_train {PROGRAM}""")
    return 0


def _help(name: str) -> str:
    with redirect_stdout(StringIO()) as shown, suppress(SystemExit):
        getattr(importlib.import_module(f"hvd_train.commands.{COMMANDS[name][0]}"), name.replace("-", "_"))(["--help"])
    return shown.getvalue()

"""`hvd-train completion SHELL`: print a script for the TAB key, with the words of all commands."""

import re
from argparse import Action, Namespace
from collections.abc import Iterable

from hvd_train import recipes
from hvd_train.commands import tree
from hvd_train.console import PROGRAM
from hvd_train.errors import UsageError, unknown_name


def completion(options: Namespace) -> int:
    """Print the script and return 0. Raises UsageError if no known shell is named."""
    if options.shell is None:
        raise UsageError(f"name the shell: type `source <({PROGRAM} completion bash)`, or zsh")
    if options.shell not in ("bash", "zsh"):
        raise unknown_name("shell", options.shell, ("bash", "zsh"))
    cases = ""
    values = dict[str, str]()
    for parser in reversed([*tree.parsers(tree.tree())]):  # the shell takes the first that fits
        words = []
        for action in parser.actions:
            flags = [flag for flag in action.option_strings if flag.startswith("--")]
            known = " ".join(_known(action))
            words += flags or [known]
            if known:
                values |= dict.fromkeys(flags, known)
        cases += f"    '{parser.prog} '*) words='{' '.join(words)}' ;;\n"
    known_values = "".join(f"    {flag}) words='{known}' ;;\n" for flag, known in values.items())
    print(f"""[ -z "$ZSH_VERSION" ] || {{ autoload -Uz compinit bashcompinit; compinit; bashcompinit; }}
_hvd_train() {{
  local words=''
  case "{PROGRAM} ${{COMP_WORDS[*]:1:$((COMP_CWORD - 1))}} " in
{cases}  esac
  case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{known_values}  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _hvd_train {PROGRAM}""")  # noqa: E501
    return 0


def _known(action: Action) -> Iterable[str]:
    """Return the values that an argument can have, as far as its choices or its help name them."""
    if action.dest in ("recipe", "words"):
        return recipes.RECIPES
    named = re.match(r"\{(.+)\}", str(action.metavar))
    return named[1].split(",") if named else action.choices or ()

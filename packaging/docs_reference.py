"""Pages of reference, in Markdown: from the help of commands and scripts, and the docstrings of the public names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hvd_train
from hvd_train import errors, recipes
from hvd_train.commands import bench
from hvd_train.commands.registry import COMMANDS, command
from hvd_train.config import free_fields
from hvd_train.console import PROGRAM
from hvd_train.errors import HvdTrainError
from hvd_train.help_page import Flag, Page

SCRIPTS = Path(__file__).resolve().parent.parent / "horovodrun_scripts"
OF_A_SESSION = ("hvd_train.own_loop.Session", "hvd_train.step.Step", "hvd_train.step.Slot")
"""What a program is given by `hvd_train.session`."""
_KINDS = {
    "DIR": "a folder",
    "FILE": "a file",
    "FLOAT": "a number",
    "INT": "a whole number",
    "N": "a whole number",
    "PATH": "a path",
    "TEXT": "a text",
    "none": "`none`",
}


def flags() -> str:
    """Return the page of all commands with their arguments, flags and examples, as `--help` has them."""
    pages = {}
    for name in COMMANDS:
        pages[name] = command(name).page([])
        if name == "bench":
            pages |= {f"bench {tool}": bench.page([tool]) for tool in bench.TOOLS}
    after = "\n".join(_command(name, page) for name, page in pages.items())
    return f"""# Commands and flags

What `{PROGRAM} COMMAND --help` prints. Each flag of `train` is a setting of the run: `--batch-size 64` is
`batch_size: 64` in `config.yaml`, and `batch_size=64` in `Config.replace`. A setting that decides the result is kept
for the life of a run; *free* ones may be others when it goes on. Recipes have defaults of their own, which
`{PROGRAM} train RECIPE --help` shows; here they are those of `{recipes.DEFAULT}`.

{after}"""


def scripts() -> str:
    """Return the page of the launch scripts, with the comments that open them, which their `--help` prints."""
    found = sorted(path for path in SCRIPTS.glob("[a-z]*") if path.suffix in (".sh", ".sbatch"))
    after = "\n".join(f"## {path.name}\n\n```text\n{opening(path)}\n```\n" for path in found)
    return f"# Launch scripts\n\nWhat the scripts in `horovodrun_scripts/` say with `--help`.\n\n{after}"


def api() -> str:
    """Return the page of the public names, which mkdocstrings fills from their docstrings."""
    failures = [error for error in vars(errors).values() if inspect.isclass(error) and issubclass(error, HvdTrainError)]
    beside = {"__version__", "recipes", *(error.__name__ for error in failures)}
    names = [name for name in hvd_train.__all__ if name not in beside]
    functions = [name for name in names if name.islower()]
    classes = [name for name in names if not name.islower()]
    codes = "\n".join(f"{_name(_path(error), members=False)}Exit code {error.exit_code}.\n" for error in failures)
    return f"""# Python names

`import hvd_train` has these names; it imports torch when one of them is first used that needs it.

## Functions

{_all(f"hvd_train.{name}" for name in functions)}
## Classes

{_all(f"hvd_train.{name}" for name in classes)}
## What a session gives

{_all(OF_A_SESSION)}
## Recipes

Functions in `hvd_train.recipes`. Each returns a `Config`, of which `replace` changes settings.

{_all(_path(make) for make in recipes.RECIPES.values())}
## Errors

{codes}"""


def opening(script: Path) -> str:
    """Return the comment that opens a script, without what is for Slurm."""
    lines = script.read_text(encoding="utf-8").splitlines()[1:]
    end = next(number for number, line in enumerate(lines) if not line.startswith("#") or line.startswith("#SBATCH"))
    return "\n".join(line[1:].removeprefix(" ") for line in lines[:end]).strip()


def _command(name: str, page: Page) -> str:
    """Return the part of the page of flags about a command."""
    blocks = [f"## {PROGRAM} {name}", page.about, f"```text\n{PROGRAM} {page.usage}\n```"]
    if page.examples:
        lines = "\n".join(page.examples)
        blocks.append(f"To type, for example:\n\n```bash\n{lines}\n```")
    if page.takes_settings:
        blocks.append(f"Every setting of a training is a flag here, too: those of [{PROGRAM} train](#{PROGRAM}-train).")
    settings = free_fields() if name == "train" else set()
    for section in (section for section in page.sections if section.flags):
        title = f"{section.title[:1].upper()}{section.title[1:]}"
        blocks += [f"### {title}" if len(page.sections) > 2 else f"**{title}**", _escaped(section.about)]
        blocks += [entry(name, flag, free=flag.names[0][2:].replace("-", "_") in settings) for flag in section.flags]
    return "\n\n".join(block for block in blocks if block) + "\n"


def entry(of: str, flag: Flag, *, free: bool) -> str:
    """Return a flag as an entry of a list of definitions, with a name to which links can lead."""
    text, default = flag.text, ""
    if found := re.fullmatch(r"(.*) \(default: (.*)\)", text):
        text, default = found[1], f" Default: `{found[2]}`."
    names = ", ".join(f"`{name}`" for name in flag.names)
    about = ", ".join(fact for fact in (kind(flag.value), "free" if free else "") if fact)
    target = f"{of.replace(' ', '-')}{flag.names[0]}" if flag.names[0].startswith("-") else ""
    return f"{names} {f'*{about}*' if about else ''} {f'{{#{target}}}' if target else ''}".rstrip() + (
        f"\n:   {_escaped(text)}{default}"
    )


def kind(value: str) -> str:
    """Return in words what follows a flag: "`cpu` or `gpu`" for `cpu|gpu`."""
    several = re.sub(r" \.\.\.|,N,\.\.\.", "", value)
    words = [_KINDS.get(word, f"`{word}`") for word in re.split(r"\||\ or ", several) if word]
    listed = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"{listed}, or several" if several != value else listed


def _escaped(text: str) -> str:
    """Return a text in which only code, between backticks, means something to Markdown."""
    return re.sub(r"(`[^`]*`)|([*_<\[{])", lambda found: found[1] or f"\\{found[2]}", text)


def _path(public: Any) -> str:
    """Return the place of a class or function: `package.module.name`."""
    return f"{public.__module__}.{public.__qualname__}"


def _all(paths: Iterable[str]) -> str:
    """Return the lines for several names."""
    return "".join(_name(path) for path in paths)


def _name(path: str, *, members: bool = True) -> str:
    """Return the lines in whose place mkdocstrings puts the documentation of a name."""
    return f"::: {path}\n" + ("" if members else "    options:\n      members: false\n") + "\n"

"""What `--help` prints, 80 columns wide: a command, what it does, lines to type, and its flags with their texts."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveTypeInfo, UnsupportedTypeAnnotationError

from hvd_train import flag_values
from hvd_train.console import PROGRAM

WIDTH = 80
_TEXTS_BEGIN = 26  # the column in which the texts of flags begin


@dataclass(frozen=True)
class Flag:
    """A flag, or an argument that has no flag, as the help shows it."""

    names: tuple[str, ...]
    """All that can be typed for it, the usual name first; for an argument its place-holder, such as RUN."""
    value: str = ""
    """What follows the name: a type in words (`INT or none`) or choices (`cpu|gpu`); empty for a switch."""
    text: str = ""

    def lines(self) -> list[str]:
        """Return the lines of the help for it."""
        head = f"  {', '.join(self.names)} {self.value}".rstrip()
        text = _wrapped(self.text, " " * _TEXTS_BEGIN)
        if len(head) > _TEXTS_BEGIN - 2 or not text:
            return [*_wrapped(head, "  ", "      "), *text]
        return [head.ljust(_TEXTS_BEGIN) + text[0].lstrip(), *text[1:]]


@dataclass(frozen=True)
class Section:
    """Flags that belong together, under a title."""

    title: str
    flags: tuple[Flag, ...]
    about: str = ""


@dataclass(frozen=True)
class Page:
    """The help of a command."""

    usage: str
    """The command with its arguments, without the name of the program: `audit RUN`."""
    about: str
    """What the command does, in two sentences at most."""
    sections: tuple[Section, ...] = ()
    examples: tuple[str, ...] = ()
    """Whole lines to type."""
    takes_settings: bool = False
    """Whether the settings of a training are flags of the command; the page of `train` lists them."""

    def text(self) -> str:
        """Return the page as it is printed."""
        blocks = [_wrapped(f"usage: {PROGRAM} {self.usage}", "", "       "), _wrapped(self.about)]
        if self.examples:
            blocks.append([f"  {line}" for line in self.examples])
        for section in self.sections:
            lines = [line for flag in section.flags for line in flag.lines()]
            blocks.append([f"{section.title}:", *_wrapped(section.about, "  "), *lines])
        if self.takes_settings:
            told = f"Every setting of a training is a flag here, too: `{PROGRAM} help train` lists them."
            blocks.append(_wrapped(told))
        blocks.append(Flag(("-h", "--help"), text="Show this help.").lines())
        return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def flags_of(
    cls: type[Any],
    values: Any = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    arguments: Sequence[str] = (),
) -> dict[str, Flag]:
    """Return the flags of a dataclass, by the names of its fields; groups of settings among the fields are left out.

    The text below a field is that of its flag, and the values of `values`, or else of the class, are shown as defaults.
    `aliases` has further names for flags; `arguments` stand for the fields that are typed without a flag, in turn.
    """
    hints, texts = typing.get_type_hints(cls, include_extras=True), _texts_below_fields(cls)
    found, unnamed = {}, iter(arguments)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if tyro.conf.Positional in getattr(kind, "__metadata__", ()):
            found[field.name] = Flag((next(unnamed),), text=texts[field.name])
            continue
        if dataclasses.is_dataclass(kind):
            continue
        default = field.default if values is None else getattr(values, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        names, value, shown = (flag, *(aliases or {}).get(flag, ())), "", ""
        if kind is bool:
            names, shown = (*names, f"--no-{flag[2:]}"), "on" if default else "off"
        else:
            with flag_values.rules():
                spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
            assert not isinstance(spec, UnsupportedTypeAnnotationError)
            value, shown = spec.metavar, " ".join(spec.str_from_instance(default)) or "none"
        said = default is None and "default:" in texts[field.name]
        found[field.name] = Flag(names, value, texts[field.name] + ("" if said else f" (default: {shown})"))
    return found


def page_of(
    cls: type[Any],
    usage: str,
    examples: tuple[str, ...],
    *arguments: str,
    aliases: Mapping[str, Sequence[str]] | None = None,
) -> Page:
    """Return the help of a command whose flags are one dataclass, which says in its docstring what the command does.

    `arguments` stand for the fields that are typed without a flag; `aliases` has further names.
    """
    flags = flags_of(cls, aliases=aliases, arguments=arguments).values()
    typed = tuple(flag for flag in flags if flag.names[0] in arguments)
    sections = [Section("arguments", typed)] if typed else []
    sections.append(Section("flags", tuple(flag for flag in flags if flag not in typed)))
    return Page(usage, inspect.getdoc(cls) or "", tuple(sections), examples)


def _texts_below_fields(cls: type[Any]) -> dict[str, str]:
    """Return the text that stands below each field of a dataclass in its source; empty where there is none."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {field.name: "" for field in dataclasses.fields(cls)}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            texts[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts


def _wrapped(text: str, indent: str = "", further: str | None = None) -> list[str]:
    """Return a text in lines of WIDTH columns at most, which begin with `indent`, all but the first with `further`."""
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if further is None else further,
        break_on_hyphens=False,
    )

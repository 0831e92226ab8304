"""The errors for the user: one line that says what, why and what to type, and an exit code."""

import difflib
import re
import sysconfig
import traceback
from argparse import (
    REMAINDER,
    Action,
    ArgumentParser,
    ArgumentTypeError,
    BooleanOptionalAction,
    Namespace,
)
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path, PosixPath
from typing import Any, NoReturn, TypeVar

T = TypeVar("T", bound=type)
TYPES: list[type] = [PosixPath]
"""The types that ranks may send to one another: what a rank receives must not
choose the code to run."""


def sendable(kind: T) -> T:
    """List a type whose values ranks may send to one another: a plain dataclass, or an error."""
    TYPES.append(kind)
    return kind


@sendable
class HvdTrainError(Exception):
    """Base of every error this package raises on purpose; `exit_code` is the
    exit code of the command.
    """

    exit_code = 1
    raised_by: int | None = None
    """The rank that raised the error, if the others only see that this rank is gone."""
    of_all_ranks = False
    """Whether all ranks find the error in the same step, so that one rank can report it."""
    asked_to_end = False
    """Whether the launcher had asked this process to end before this error."""

    def __init_subclass__(cls) -> None:
        sendable(cls)


class UsageError(HvdTrainError):
    """The settings, the data or the environment cannot give a run; nothing has
    been started or overwritten.
    """

    exit_code = 2


class RankLost(HvdTrainError):
    """A collective operation broke because another rank ended or could not be reached."""

    exit_code = 3
    step = 0
    """The steps that this rank had finished."""


class ReplicasDiffer(HvdTrainError):
    """Ranks that must hold the same weights differ."""

    exit_code = 4
    of_all_ranks = True


class SumsOverflow(HvdTrainError):
    """A gradient is too large for its sum; all ranks raise it, before the update."""


class PassesDiffer(HvdTrainError):
    """Two ranks have computed a micro-batch differently; all ranks raise it, before the update."""

    def __init__(self, what: str, ranks: Sequence[int], *, is_again: bool) -> None:
        """Say what they have computed; `ranks` is one rank if the others show that it is wrong.

        `is_again`: in this step not for the first time.
        """
        super().__init__(what)
        self.ranks = ranks
        self.is_again = is_again


class RankDiffers(ReplicasDiffer):
    """This rank computes wrongly, or holds other weights than most ranks."""


class FaultRepeats(HvdTrainError):
    """The same step fails repeatedly, in one world after another."""

    exit_code = 5


class Diverged(HvdTrainError):
    """Step after step has a loss or a gradient that is not finite.

    All ranks find it in the same step.
    """

    exit_code = 6
    of_all_ranks = True


class DataTimeout(HvdTrainError):
    """The store of the data has failed for as long as `--data-timeout`."""

    exit_code = 7


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a name that is not in `known`, with the nearest one
    or else the first twelve.
    """
    names = sorted(known)
    same = [each for each in names if each.lower() == name.lower()]
    nearest = same or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(names[:12])}"
    if not nearest and (code := re.fullmatch(r"([^\W\d][\w.]*)\.(\w+)", name)):
        hint = f"code of your own is written {code[1]}:{'function' if code[2] == 'py' else code[2]}"
    return UsageError(f"unknown {kind} {name!r}; {hint}")


def in_user_code(error: BaseException) -> tuple[list[traceback.FrameSummary], str]:
    """Return the frames of an error from the user's first one on, and the place of their
    last; none if all are ours.
    """
    frames = traceback.extract_tb(error.__traceback__)
    of_others = (
        str(Path(__file__).parent),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
    )
    is_ours = [frame.filename.startswith(of_others[0]) for frame in frames]
    entry = is_ours.index(True) if True in is_ours else -1  # before it is the console script
    own = [
        n
        for n, frame in enumerate(frames)
        if n > entry and not frame.filename.startswith((*of_others, "<"))
    ]
    if not own:
        return [], ""
    return frames[own[0] :], place_of(frames[own[-1]])


def place_of(frame: traceback.FrameSummary) -> str:
    """Return the file, line and function of a frame for the user."""
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}"


def place_in_user_code(error: BaseException) -> str:
    """Return ` (FILE, line N, in f)` for an error in the user's code, else an empty text."""
    _, place = in_user_code(error)
    return f" ({place})" if place else ""


def first_line(error: object) -> str:
    """Return the first line of an error's text, or its type without a text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def flag(setting: str) -> str:
    """Return the flag of a setting."""
    return f"--{setting.replace('_', '-')}"


def first_few(items: Sequence[object], most: int = 4) -> str:
    """Return the first `most` items in one line, and how many more there are."""
    shown = ", ".join(map(str, items[:most]))
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown


def described(thing: object) -> str:
    """Return what a thing is, for a message that says what it must be."""
    return (
        f"the class {thing.__name__}"
        if isinstance(thing, type)
        else f"of type {type(thing).__name__}"
    )


def counted(count: int, noun: str) -> str:
    """Return a number of things, as in `1 rank` and `2 ranks`."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


class Parser(ArgumentParser):
    """A parser whose errors are UsageErrors, and whose flags are written in full.

    `elsewhere` has advice for flags of other programs.
    """

    def __init__(self, *, elsewhere: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.commands: dict[str, Parser] = {}
        self._elsewhere = elsewhere or {}

    def add_commands(self) -> Any:
        """Let commands follow, each with its own parser; return the object
        whose `add_parser` adds one.
        """
        added = self.add_subparsers(title="commands", metavar="COMMAND")
        self.commands = added.choices
        return added

    @property
    def actions(self) -> Sequence[Action]:
        """All arguments, in order."""
        return self._actions

    def error(self, message: str) -> NoReturn:  # noqa: D102
        raise UsageError(message.removeprefix("argument "))

    def read(self, arguments: Sequence[str]) -> Namespace:
        """Return the values of the arguments; words may stand between flags. Raises UsageError."""
        # the command of another program
        if any(action.nargs == REMAINDER for action in self._actions):
            return self.parse_args(arguments)
        dashed = [
            re.sub(r"^--[\w-]+", lambda flag: flag[0].replace("_", "-"), argument)
            for argument in arguments
        ]
        for flag, word in pairwise(dashed):
            is_switch = isinstance(self._option_string_actions.get(flag), BooleanOptionalAction)
            if is_switch and not word.startswith("-"):
                why = f"a switch, such as {flag}, takes no value"
                raise UsageError(f"unexpected {word!r}: leave it out ({why})")
        options, rest = self.parse_known_intermixed_args(dashed)
        if unknown := next((word for word in rest if word.startswith("-")), None):
            flag = unknown.partition("=")[0]
            if flag in self._elsewhere:
                command = self.prog.partition(" ")[2]
                raise UsageError(f"{flag} is no flag of {command}: {self._elsewhere[flag]}")
            raise unknown_name("argument", flag, self._option_string_actions)
        if rest:
            raise UsageError(f"unexpected {rest[0]!r}: leave it out")
        return options


def _from(least: int, text: str) -> int:
    number = whole_number(text)
    if number is None or not least <= number < 10**9:
        raise ArgumentTypeError(f"{text}: it must be a whole number from {least} on")
    return number


from_one = partial(_from, 1)
"""Returns the number of a whole number from 1 on, for a Parser."""
from_zero = partial(_from, 0)
"""Returns the number of a whole number from 0 on, for a Parser."""


def whole_number(text: str) -> int | None:
    """Return the number of one to eighteen digits 0 to 9; None for any other text."""
    # str.isdigit is true for ², which int refuses
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None

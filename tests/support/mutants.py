"""Mutants: small changes to the core, one at a time, which the unit tests of their room must notice.

python -m tests.support.mutants                        a random sample of all mutants; --sample 300 --seed 0
python -m tests.support.mutants progress loop          every mutant of a room or a module
python -m tests.support.mutants progress --sample 50   a sample of these

mutmut makes the mutants and runs the tests; [tool.mutmut] in pyproject.toml lists the core. A mutant meets the tests in
its own room's folder that call the changed function, the fastest first, until one fails. What was found stays in
mutants/: `mutmut show NAME` prints a mutant. Exit code 0: at least 90 % were noticed; 1: fewer; 2: the tests
fail without any change.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import libcst as cst
import psutil
from mutmut import __main__ as mutmut
from mutmut.configuration import config
from mutmut.mutation import data, file_mutation, mutators
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.utils import file_utils, format_utils
from mutmut.workers.isolation import ForkServerRunner

AIM = 0.9
STORY = "story"
"""The room of modules at the top level, whose tests are in tests/unit/story."""
KILLED = (1, 2, 3)  # pytest: a test failed, ended the run, or broke pytest itself
_WORDS = {0: "survived", 33: "survived, as its module has no test"}
NOT_RUN = (4, 5, 255)  # pytest was started with tests that it does not find
_RUN = "MUTANTS_OF"
"""An environment variable by which processes that a mutant leaves behind are found."""


@dataclass(frozen=True)
class Mutant:
    """A mutant by mutmut's name for it, and the file that it changes."""

    name: str
    path: Path

    @property
    def module(self) -> str:
        return ".".join(self.path.with_suffix("").parts[1:])

    @property
    def room(self) -> str:
        return room_of(self.module)

    def tests(self) -> list[str]:
        """Return the tests of its room that call the changed function, the fastest first.

        After them come those tests of its module that call nothing of it but, perhaps, in processes of their own.
        """
        tests_of = state().tests_by_mangled_function_name
        called_by = tests_of[format_utils.mangled_name_from_mutant_name(self.name)]
        in_room = [test for test in called_by if test.startswith(f"{folder(self.room)}/")]
        begin = f"hvd_train.{self.module}.x"
        calling = {test for name, tests in tests_of.items() if name.startswith(begin) for test in tests}
        others = {*_tests_in(f"{folder(self.room)}/test_{self.path.stem}")} - calling
        return fastest_first(in_room) + fastest_first(others)

    def described(self) -> str:
        """Return where the change is, and the line before and after it."""
        function, of_class = format_utils.orig_function_and_class_names_from_key(self.name)
        mangled = self.name.rpartition(".")[2]
        original = f"{format_utils.mangled_name_from_mutant_name(mangled)}__mutmut_orig"
        sources = data.MutantLineSpans.load(self.path).read_function_sources([original, mangled])
        before, after = (text.replace(original, mangled).splitlines() for text in sources)
        start = next(number for number, line in enumerate(before) if line.lstrip().startswith("def "))
        changed = next(number for number, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1])
        line = _line_of(self.path, function, of_class) + changed - start
        return f"{self.path}:{line}  {before[changed].strip()}  ->  {after[changed].strip()}"


class Tests(PytestRunner):
    """Runs tests for mutmut. What tests start while mutmut notes who calls what is not part of that."""

    def run_stats(self, *, tests: Iterable[str]) -> int:
        del os.environ["MUTANT_UNDER_TEST"]  # known to this process by other means, too
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return super().run_stats(tests=tests)

    def run_tests(self, *, mutant_name: str | None, tests: Iterable[str]) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return super().run_tests(mutant_name=mutant_name, tests=tests)


def main() -> int:
    """Make the mutants, run the tests against them, say what was found."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the tests that run, too
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="rooms (progress, story, ...) or modules (loop, elastic.roster)")
    parser.add_argument("--sample", type=int, help="try so many, chosen at random; without names, 300")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    began = time.monotonic()
    mutants = make(arguments.names, arguments.workers)
    print(f"{len(mutants)} mutants of {len({mutant.module for mutant in mutants})} modules", flush=True)
    count = arguments.sample or (len(mutants) if arguments.names else 300)
    chosen = random.Random(arguments.seed).sample(mutants, min(count, len(mutants)))
    codes = run(chosen, arguments.workers)
    return report(codes, time.monotonic() - began)


def make(names: list[str], workers: int) -> list[Mutant]:
    """Write the mutants of these rooms and modules, or of all the core, into the folder mutants/."""
    shutil.rmtree("mutants", ignore_errors=True)
    _choose_kinds()
    core = [Mutant("", path) for path in file_utils.walk_mutatable_files() if path.name != "__init__.py"]
    if unknown := {*names} - {name for one in core for name in (one.module, one.room)}:
        raise SystemExit(f"the core (see pyproject.toml) has no room and no module {' or '.join(sorted(unknown))}")
    chosen = [one for one in core if not names or {one.module, one.room} & {*names}]
    config().only_mutate = [str(one.path) for one in chosen]
    config().pytest_add_cli_args_test_selection = sorted({folder(one.room) for one in chosen})
    Path("mutants").mkdir()
    with mutmut.CatchOutput():
        file_utils.copy_src_dir()
        file_utils.copy_also_copy_files()
        mutmut.create_mutants(workers)
    file_utils.setup_source_paths()
    # What tests start takes its code from there, too.
    os.environ["PYTHONPATH"] = f"{Path('mutants').absolute()}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    found, _ = mutmut.collect_source_file_mutation_data(mutant_names=[])
    return sorted((Mutant(name, Path(file.path)) for file, name, _ in found), key=lambda mutant: mutant.name)


def run(mutants: list[Mutant], workers: int) -> dict[Mutant, int]:
    """Return each mutant's exit code of pytest; those that are not killed are printed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # the tests are to import their own copy
    sys.modules["__main__"] = ModuleType("__main__")  # and their processes not to import this program
    os.environ |= {"PY_IGNORE_IMPORTMISMATCH": "1", _RUN: str(os.getpid())}
    runner = ForkServerRunner(max_workers=workers, test_runner_class=Tests, test_runner_args={})
    set_mutant_under_test("stats")
    if runner.collect_stats([]) != 0:
        print("the tests fail without any mutant")
        raise SystemExit(2)
    codes: dict[Mutant, int] = {}
    waiting = {mutant.name: mutant for mutant in mutants}
    # One run of each room's tests, called as they are for the mutants but without one, shows that these runs can pass.
    controls = {f"{room}.x_control__mutmut_0": room for room in sorted({mutant.room for mutant in mutants})}
    tests = {name: fastest_first(_tests_in(f"{folder(room)}/")) for name, room in controls.items()}
    tests |= {mutant.name: mutant.tests() for mutant in mutants}
    left = sorted(tests, key=lambda name: (name not in controls, sum(map(_seconds, tests[name]))))
    again: list[str] = []
    tried_again: set[str] = set()
    runner.startup()
    try:
        while left or again or runner.pending_count():
            if (left and runner.has_capacity()) or (again and not runner.pending_count()):
                name = (left or again).pop(0)
                expected = sum(map(_seconds, tests[name]))
                limit = (expected + config().timeout_constant) * config().timeout_multiplier
                runner.submit(name, tests[name], math.ceil(2 * limit), expected)
                continue
            result = runner.wait_for_result()
            if result.exit_code not in (*_WORDS, *KILLED, *NOT_RUN):
                _end_left_processes(result.mutant_name)
                if result.mutant_name not in tried_again:
                    tried_again.add(result.mutant_name)
                    again.append(result.mutant_name)  # alone, after all others: the machine may have been too busy
                    continue
            if (result.mutant_name in controls and result.exit_code != 0) or result.exit_code in NOT_RUN:
                print(f"pytest ends with {result.exit_code} for {result.mutant_name}, for no fault of a mutant")
                raise SystemExit(2)
            if result.mutant_name in waiting:
                mutant = waiting[result.mutant_name]
                codes[mutant] = result.exit_code
                if result.exit_code not in KILLED:
                    print(f"{len(codes)} of {len(mutants)}: {_WORDS.get(result.exit_code, 'timed out or crashed')}")
                    print(f"  {mutant.described()}  [{mutant.name}]", flush=True)
    except BaseException:
        runner.stop_all_workers()
        raise
    finally:
        runner.shutdown()
    return codes


def report(codes: dict[Mutant, int], seconds: float) -> int:
    """Print the share of each module and the rate, and return the exit code."""
    survived = [mutant for mutant, code in codes.items() if code in _WORDS]
    for module in sorted({mutant.module for mutant in codes}):
        of = [mutant for mutant in codes if mutant.module == module]
        print(f"{module:30} {sum(mutant not in survived for mutant in of):4} of {len(of):4}")
    killed = sum(code in KILLED for code in codes.values())
    timed_out = len(codes) - killed - len(survived)
    rate = (killed + timed_out) / len(codes)
    low, high = interval(killed + timed_out, len(codes))
    print(
        f"{killed} killed, {timed_out} timed out or crashed, {len(survived)} survived: {rate:.1%} of {len(codes)} "
        f"mutants were noticed (95 % interval: {low:.1%} to {high:.1%}), in {seconds / 60:.0f} minutes"
    )
    return 0 if rate >= AIM else 1


def interval(hits: int, count: int) -> tuple[float, float]:
    """Return Wilson's interval, which holds the share of all with 95 % confidence where `hits` of a sample were."""
    z = 1.96
    middle = (hits + z**2 / 2) / (count + z**2)
    half = z / (count + z**2) * math.sqrt(hits * (count - hits) / count + z**2 / 4)
    return middle - half, middle + half


def room_of(module: str) -> str:
    return module.split(".")[0] if "." in module else STORY


def folder(room: str) -> str:
    return f"tests/unit/{room}"


def fastest_first(tests: Iterable[str]) -> list[str]:
    return sorted(tests, key=lambda test: (_seconds(test), test))


def _seconds(test: str) -> float:
    return state().duration_by_test[test]


def _tests_in(path: str) -> list[str]:
    """Return the tests of a folder or of modules, of which this is the beginning of the path."""
    return [test for test in state().duration_by_test if test.startswith(path)]


def _choose_kinds() -> None:
    """Leave out what only people read, and take in what mutmut leaves out: see CONTRIBUTING."""
    kinds = [(kind, made) for kind, made in mutators.mutation_operators if made is not mutators.operator_string]
    file_mutation.mutation_operators = [*kinds, (cst.BaseString, _words), (cst.Expr, _call_dropped)]
    mutmut.mutate_file_contents = _mutated


def _mutated(name: str, code: str, *lines: set[int] | None) -> file_mutation.MutatedFile:
    """Mutate overriding methods, too: mutmut leaves decorated functions alone, but this decorator does nothing."""
    return file_mutation.mutate_file_contents(name, code.replace("@override\n", "# override\n"), *lines)


def _words(node: cst.BaseString) -> Iterator[cst.BaseString]:
    """Change a string, unless it is a text that people read."""
    if isinstance(node, cst.SimpleString) and " " not in node.value:
        yield from mutators.operator_string(node)


def _call_dropped(node: cst.Expr) -> Iterator[cst.Pass]:
    """Leave out a call of which the result is not used."""
    if isinstance(node.value, cst.Call):
        yield cst.Pass()


def _line_of(path: Path, function: str, of_class: str | None) -> int:
    tree: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    if of_class:
        tree = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == of_class)
    return next(n.lineno for n in ast.iter_child_nodes(tree) if isinstance(n, ast.FunctionDef) and n.name == function)


def _end_left_processes(name: str) -> None:
    """End what the tests of a mutant have started, where they were ended themselves."""
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get(_RUN) == str(os.getpid()) and environment.get("MUTANT_UNDER_TEST") == name:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())

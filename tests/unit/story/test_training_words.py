"""What a training says of itself in metrics.jsonl and in its errors, from its start to its end."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typing_extensions import override

from hvd_train import checkpoint, run, training
from hvd_train.errors import Diverged, RankLost, UsageError
from hvd_train.launch import last_word
from hvd_train.profiling.profile import Profile
from hvd_train.progress.clock import Split, Stopwatch
from hvd_train.run_files.journal import RunJournal
from hvd_train.world.world import LocalWorld, already_in_sync
from tests.support.elastic import Hosts, Kill, run_elastic
from tests.support.runs import small_config, trained
from tests.support.worlds import Fault, StoppingWorld, ThreadWorld, run_ranks
from tests.unit.story.test_loop import Poisoned
from tests.unit.story.test_training_end import records

T = TypeVar("T")


def events(name: str) -> list[dict[str, object]]:
    """The events of a name in metrics.jsonl."""
    return [event for event in records("event") if event["name"] == name]


def test_the_start_has_the_facts_that_an_audit_needs() -> None:
    """How many ranks and samples there are, how often each comes, and by which seed they are ordered."""
    config = small_config(epochs=2, seed=3, repeated_augmentation=2)
    run_ranks(2, lambda world: trained(world, config))
    (start,) = events("start")
    facts = ("world_size", "num_samples", "repeated_augmentation", "seed")
    assert [start[name] for name in facts] == [2, 190, 2, 3]
    assert "(190 images), 2 ranks on cpu, 20 images a step in 5 slots of 4" in str(start["message"])


def test_what_a_run_runs_on_is_written_at_its_start() -> None:
    """The hosts of all ranks, by name; without a GPU the processor."""
    run_ranks(2, lambda world: trained(world, small_config(epochs=1)))
    written = json.loads(Path("run/environment.json").read_text())
    assert (written["world_size"], written["ranks_of_hosts"]) == (2, {socket.gethostname(): 2})
    assert isinstance(written["device"], str)


def test_the_end_is_told_as_the_last_thing() -> None:
    """Why nothing more is trained, and where the files are; of what a script alone knows there is nothing to type."""
    trained(LocalWorld(), small_config(epochs=1))
    last = records("event")[-1]
    assert last["name"] == "end"
    assert str(last["message"]).endswith("\nfiles: run")


def test_notes_on_the_parts_are_told_once_in_the_life_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it starts, and not when it goes on."""
    warm_parts = run.warm_parts

    def noted(*parts: object) -> object:
        made, optimizer = warm_parts(*parts)  # type: ignore[arg-type]
        return replace(made, notes=("the first", "the second")), optimizer

    monkeypatch.setattr(run, "warm_parts", noted)
    for steps in (3, 4):
        trained(StoppingWorld(steps), small_config())
        assert [event["message"] for event in events("note")] == ["the first", "the second"]
    assert len(events("start")) == 2


@pytest.mark.parametrize(
    ("event", "why"),
    [(Hosts(4, (("h1", 1),)), "hosts came or went"), (Kill(4, rank=1), "a rank was lost")],
    ids=str,
)
def test_the_cause_of_a_change_of_world_is_told(event: Hosts | Kill, why: str) -> None:
    """A wish of the hosts is not a fault."""
    config = small_config(epochs=1)
    run_elastic(lambda world: trained(world, config), {"h1": 1, "h2": 1}, [event], first=2, most=2)
    assert events("world")[0]["why"] == why


def test_a_lost_rank_and_a_full_disk_are_both_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody believes the last step to be on disk."""

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", fails)

    def body(world: ThreadWorld) -> None:
        with pytest.raises(RankLost, match=r"step \d is NOT committed \(see above\); the same command goes on"):
            trained(world, small_config())

    run_ranks(2, body, [Fault(1, step=3)])


def test_a_training_that_diverges_on_a_full_disk_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And else that its weights are committed."""
    config = small_config(epochs=1, max_skipped_steps=2)

    def diverges() -> str:
        with pytest.raises(Diverged) as told:
            trained(LocalWorld(), config, lambda _: Poisoned(lambda _: True, "gradient"))
        return str(told.value)

    assert "2 steps in a row were skipped; in the last one, step 2, the loss is finite, but not its gradient;" in (
        message := diverges()
    )
    assert "the weights are those before them, and committed; try a smaller" in message

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", fails)
    assert "and NOT committed (see above); try a smaller" in diverges()


def test_an_error_before_the_ranks_meet_is_told_as_one_of_building(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of the job hears it, with the environment that says where the driver is; no step has been done."""
    heard: list[object] = []

    def tell(environ: Mapping[str, str], error: Exception, during: str = "", step: int = -1) -> bool:
        heard.append((environ is os.environ, str(error), during, step))
        return False

    class Broken(LocalWorld):
        @override
        def in_each_world(
            self, body: Callable[[], Iterable[T]], sync: Callable[[], None] = already_in_sync
        ) -> Iterator[T]:
            raise UsageError("no network")

    monkeypatch.setattr(last_word, "tell", tell)
    with pytest.raises(UsageError, match="no network"):
        trained(Broken(), small_config())
    assert heard == [(True, "no network", "building", 0)]


def test_a_process_that_leaves_before_the_ranks_meet_leaves_no_folder() -> None:
    """It has nothing to commit, and its exit code is that of whoever ended it."""

    class Unwanted(LocalWorld):
        @override
        def in_each_world(
            self, body: Callable[[], Iterable[T]], sync: Callable[[], None] = already_in_sync
        ) -> Iterator[T]:
            raise SystemExit(7)

    with pytest.raises(SystemExit) as left:
        trained(Unwanted(), small_config())
    assert left.value.code == 7
    assert not Path("run").exists()


def test_a_profile_hears_of_all_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which steps were asked for, after which step this process begins, and each step that is done."""
    heard: list[object] = []

    class Noted(Profile):
        @override
        def __init__(self, steps: range, *rest: Any) -> None:
            super().__init__(range(0), *rest)
            world, device, journal, folder, stopwatch, split = rest
            assert isinstance(journal, RunJournal)
            heard.extend([steps, world.place.size, device.type, folder])
            assert (type(stopwatch), type(split)) == (Stopwatch, Split)

        @override
        @contextmanager
        def within(self, step: int) -> Iterator[None]:
            heard.append(step)
            with super().within(step):
                yield

        @override
        def step_done(self, step: int) -> None:
            heard.append(step)

    monkeypatch.setattr(training, "Profile", Noted)
    trained(StoppingWorld(3), small_config(profile="2:4"))
    first = [range(2, 5), 1, "cpu", Path("run")]
    assert heard == [*first, 0, 1, 2]  # the third step is the last one of this process
    heard.clear()
    trained(StoppingWorld(2), small_config(profile="2:4"))
    assert heard == [*first, 3, 4]

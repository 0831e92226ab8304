"""Copies of commits in a remote folder: whole at any moment, and never in the way of a training."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from hvd_train.errors import UsageError
from hvd_train.run_files import copies, remote, run_folder
from hvd_train.run_files.copies import Copies, bring
from hvd_train.run_files.durable import always
from hvd_train.run_files.remote import OWNER, Remote
from hvd_train.run_files.run_folder import Busy
from tests.support.launching import wait_for

WORK = Path("cache/work")


class Killed(BaseException):
    """The process is gone."""


class Faulty(Remote):
    """A remote folder whose operation of a certain number tears, or whose operations fail or hang for a time."""

    def __init__(self, tears_at: int = 0) -> None:
        super().__init__(f"file://{Path.cwd()}/remote")
        self.tears_at, self.done = tears_at, 0
        self.error: Exception | None = None
        self.free = threading.Event()
        self.free.set()

    def _count(self) -> bool:
        self.free.wait(60)
        if self.error is not None:
            raise self.error
        self.done += 1
        return self.done == self.tears_at

    def write(self, name: str, content: bytes) -> None:
        if self._count():
            super().write(f"{name}.partial", content[: len(content) // 2])
            raise Killed
        super().write(name, content)

    def upload(self, file: BinaryIO, size: int, at: str, moved: Callable[[int], None]) -> tuple[int, str]:
        if self._count():
            super().upload(file, size // 2, at, moved)
            raise Killed
        return super().upload(file, size, at, moved)

    def remove(self, name: str) -> None:
        if self._count():
            raise Killed
        super().remove(name)


def train(folder: Path, step: int) -> None:
    """What a run has in its folder after a step; two checkpoints stay."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "tensorboard").mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("as it was")
    (folder / "checkpoints" / f"step-{step:010d}.ckpt").write_text(f"state {step}")
    (folder / "checkpoints" / f"step-{step - 2:010d}.ckpt").unlink(missing_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f"line {number}\n" for number in range(step + 1)))
    (folder / "tensorboard" / "events").write_text(f"curves {step}")
    (folder / "model-best.partial").write_text("half")
    best = folder / "model-best.pt"
    best.with_suffix(".new").write_text(f"best {step}")
    best.with_suffix(".new").rename(best)


def step_in(folder: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(path.stem[5:]) for path in folder.glob("checkpoints/*.ckpt")), default=-1)


def copier(place: Remote, folder: Path = WORK, **changes: Any) -> Copies:
    """What copies the folder."""
    return Copies(place, folder, **{"keep": 2, "job": "", "permission": always, **changes})


def brought(place: Remote, folder: Path = WORK, *, goes_on: bool = True, **changes: Any) -> list[str]:
    """Bring a folder up to date; what the user was told."""
    told: list[str] = []
    bring(place, folder, changes.pop("owner", ""), told.append, goes_on=goes_on, step_in=step_in, **changes)
    return told


def consistent(folder: Path) -> int:
    """The step of a folder, all of whose files are of it."""
    step = step_in(folder)
    assert (folder / "checkpoints" / f"step-{step:010d}.ckpt").read_text() == f"state {step}"
    assert (folder / "metrics.jsonl").read_text().splitlines()[-1] == f"line {step}"
    assert (folder / "model-best.pt").read_text() == f"best {step}"
    assert (folder / "tensorboard/events").read_text() == f"curves {step}"
    assert (folder / "config.yaml").read_text() == "as it was"
    return step


def test_whatever_operation_a_process_is_killed_in_the_newest_whole_commit_is_found() -> None:
    """On an empty machine each time; with the commit that was being made at most lost, and nothing left behind."""
    step, tears_at, lives = 0, 1, 0
    while True:
        place = Faulty(tears_at)
        named = step
        try:
            copying = copier(place)
            copying.claim()
            for step in range(named + 1, named + 5):
                train(WORK, step)
                copying._copy_newest()
                named = step
            done = True
        except Killed:
            done = False
        shutil.rmtree("cache", ignore_errors=True)
        told = brought(Faulty())
        assert all(line.startswith("fetching") for line in told)
        found = consistent(WORK) if named or (WORK.exists() and step_in(WORK) >= 0) else 0
        assert named <= found <= step
        step = found
        lives += 1
        if done:
            break
        tears_at += 1
    assert lives > 30
    names = {path.relative_to("remote").as_posix() for path in Path("remote").rglob("*") if path.is_file()}
    kept = [json.loads((Path("remote") / name).read_text()) for name in names if name.startswith("manifest-")]
    assert names - {OWNER} - {name for name in names if name.startswith("manifest-")} == {
        file["at"] for one in kept for file in one["files"]
    }
    assert len(kept) == 2


def test_a_damaged_commit_gives_way_to_the_one_before() -> None:
    """It is named. Where none is whole, nothing is begun in its place."""
    copying = copier(Faulty())
    copying.claim()
    for step in (1, 2):
        train(WORK, step)
        copying._copy_newest()
    (newest,) = Path("remote").rglob("step-0000000002.ckpt")
    newest.write_text("state X")
    shutil.rmtree("cache")
    told = brought(Faulty())
    assert [line.partition(": ")[2] for line in told if line.startswith("skipping")] == [
        f"{newest.relative_to('remote')} is not what manifest-000000000002-{copying._token}.json says"
    ]
    assert consistent(WORK) == 1
    (oldest,) = Path("remote").rglob("step-0000000001.ckpt")
    oldest.unlink()
    shutil.rmtree("cache")
    with pytest.raises(UsageError, match="no commit there is whole"):
        brought(Faulty())
    for path in Path("remote").glob("manifest-*"):
        path.write_text("{")
    with pytest.raises(UsageError, match="there is no whole commit"):
        brought(Faulty())


def test_a_folder_that_is_newer_stays_and_one_of_another_life_is_moved_aside() -> None:
    """What is here of the same run and not copied yet is not lost, whatever is there."""
    copying = copier(Faulty())
    copying.claim()
    train(WORK, 3)
    copying._copy_newest()
    train(WORK, 4)
    assert brought(Faulty()) == []
    assert consistent(WORK) == 4
    (WORK / "checkpoints/step-0000000004.ckpt").unlink()
    (WORK / "checkpoints/step-0000000003.ckpt").unlink()
    assert brought(Faulty()) == [f"fetching step 3 from {copying.url}"]
    assert consistent(WORK) == 3
    assert [path.name for path in Path("cache").iterdir()] == ["work"]

    train(Path("cache/elsewhere"), 9)
    (told,) = [line for line in brought(Faulty(), Path("cache/elsewhere")) if "aside" in line or "is now in" in line]
    assert told == "the earlier run in cache/elsewhere is now in cache/elsewhere.old"
    assert consistent(Path("cache/elsewhere")) == 3
    assert consistent(Path("cache/elsewhere.old")) == 9

    shutil.rmtree("remote")
    assert brought(Faulty()) == [f"{copying.url} was emptied: what was here of it is now in cache/work.old"]


def test_what_is_there_is_not_replaced_unasked() -> None:
    """A run where another one is to begin, and files that are none of a run; the same elastic job goes on."""
    Path("remote").mkdir()
    Path("remote/thesis.doc").touch()
    with pytest.raises(UsageError, match="is not empty and not a run of hvd_train"):
        brought(Faulty())
    Path("remote/thesis.doc").unlink()
    copying = copier(Faulty(), job="job-1")
    copying.claim()
    train(WORK, 1)
    copying._copy_newest()
    shutil.rmtree("cache")
    with pytest.raises(UsageError, match="holds a run already, which is not moved aside there"):
        brought(Faulty(), goes_on=False, owner="job-2")
    assert not (WORK / "config.yaml").exists()
    brought(Faulty(), goes_on=False, owner="job-1")
    assert consistent(WORK) == 1
    assert run_folder.belongs_to(WORK, "job-1")


def test_a_folder_in_which_a_process_trains_is_left_alone() -> None:
    """Whatever is there."""
    copying = copier(Faulty())
    copying.claim()
    train(WORK, 1)
    copying._copy_newest()
    shutil.rmtree("cache")
    WORK.mkdir(parents=True)
    with run_folder.take_lock(WORK, ""), pytest.raises(Busy):
        brought(Faulty())
    assert not (WORK / "config.yaml").exists()


def test_one_that_lost_its_place_stops_with_a_line() -> None:
    """It writes no manifest any more, and says who is there; so does one whose working folder was taken."""
    told: list[str] = []
    first = copier(Faulty())
    assert first.claim() is None
    train(WORK, 1)
    first.start(told.append)
    assert first.wait()
    note = copier(Faulty(), Path("cache/other")).claim()
    assert note is not None
    assert "is taken over from" in note
    train(WORK, 2)
    assert not first.wait()
    assert len(told) == 1
    assert "was taken over by another process" in told[0]
    assert told[0].endswith(f"nothing more is copied to {first.url}, and training goes on")
    assert len(list(Path("remote").glob("manifest-*"))) == 1
    first.close(told.append)
    assert (Path("remote") / OWNER).exists()

    train(WORK, 3)
    told.clear()
    given_up = copier(Faulty(), permission=lambda: False)
    given_up.claim()
    given_up.start(told.append)
    assert not given_up.wait()
    assert told[0].startswith("another process has taken over cache/work; nothing more is copied to")


def test_a_service_that_fails_is_told_once_and_so_is_the_copy_that_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on meanwhile; what is copied then is the newest commit."""
    monkeypatch.setattr(copies, "_SHORTEST_PAUSE_S", 0.01)
    monkeypatch.setattr(copies, "_LONGEST_PAUSE_S", 0.02)
    place, told = Faulty(), list[str]()
    place.error = ConnectionError("no route to it")
    copying = copier(place)
    train(WORK, 1)
    copying.start(told.append)
    copying.ask()
    wait_for("the first line", lambda: told)
    train(WORK, 2)
    copying.ask()
    place.error = None
    assert copying.wait()
    copying.close(told.append)
    assert told == [
        f"cannot copy to {place.url}: no route to it; training goes on, and it is tried again and again",
        f"copies to {place.url} work again: step 2 is there",
    ]
    assert not (Path("remote") / OWNER).exists(), "nobody is there any more"


def test_older_commits_that_cannot_be_removed_stay_and_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write there may not always remove; each commit is copied all the same."""
    place, told = Faulty(), list[str]()

    def fails(*_: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(place, "remove", fails)
    copying = copier(place)
    copying.start(told.append)
    for step in range(1, 6):
        train(WORK, step)
        assert copying.wait()
    copying.close(told.append)
    assert told == [f"cannot remove older commits from {place.url}: Access Denied; they stay there"]
    assert next(place.commits(pytest.fail)).step == 5


def test_the_end_waits_for_what_moves_and_not_for_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how far it is, and what is behind, with what to do."""
    monkeypatch.setattr(copies, "_SHOWN_S", 0.2)
    monkeypatch.setattr(copies, "STALLED_S", 1.5)
    place, told = Faulty(), list[str]()
    copying = copier(place)
    copying.claim()
    train(WORK, 1)
    place.free.clear()
    copying.start(told.append)
    assert not copying.wait()
    assert told[0].startswith(f"waiting for the copy to {place.url}: 0.0 of 0.0 MB")
    assert told[-1].startswith(f"{place.url} is behind: nothing could be copied there for")
    assert str(WORK) in told[-1]
    number = len(told)
    copying.close(told.append)
    place.free.set()
    assert len(told) == number


def test_a_working_folder_of_another_user_or_behind_a_link_is_refused() -> None:
    """Whoever has planted it would decide what is trained on."""
    Path("cache").mkdir()
    Path("elsewhere").mkdir()
    WORK.symlink_to(Path("elsewhere").resolve())
    with pytest.raises(UsageError, match="is a link or another user's"):
        brought(Faulty())


def test_weights_in_two_formats_are_copied_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The older file, which is about to go, is not."""
    place = Faulty()
    copying = copier(place)
    copying.claim()
    train(WORK, 1)
    (WORK / "model-best.safetensors").write_text("newer")
    copying._copy_newest()
    (commit,) = place.commits(pytest.fail)
    assert [file.name for file in commit.files if file.name.startswith("model-")] == ["model-best.safetensors"]
    assert remote.number_of(commit.manifest) == 1

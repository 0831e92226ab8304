"""The run folder of a command, and the processes that may train in it."""

import fcntl
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from hvd_train import Config, config_file
from hvd_train.errors import UsageError
from hvd_train.run_files import run_folder
from hvd_train.run_files.run_folder import Busy, Find, RunFolder, claim

NOON = datetime(2026, 1, 2, 12)
DIGITS = Config().replace(recipe="digits")


def own(minute: int, **changes: object) -> RunFolder:
    """Claim a folder in runs/."""
    return claim(DIGITS.replace(**changes), NOON.replace(minute=minute))


def mine(find: Find = lambda folder: None, *, evict: bool = False, **changes: object) -> RunFolder:
    """Claim the folder `mine`, or another one."""
    config = Config().replace(**{"output_dir": Path("mine"), **changes})
    return claim(config, NOON, find, evict=evict)


def released(folder: RunFolder) -> RunFolder:
    folder.release()
    return folder


def test_a_new_folder_is_made_and_an_empty_one_is_taken() -> None:
    folder = released(mine(output_dir=Path("a/b/mine")))
    assert (folder.path, folder.earlier, folder.notes) == (Path("a/b/mine"), False, ())
    written = config_file.load(Path("a/b/mine/config.yaml"))
    assert written == Config().replace(output_dir=Path("a/b/mine"))
    Path("mine").mkdir()
    assert not released(mine()).earlier
    Path("mine/config.yaml").unlink()
    assert [path.name for path in Path("mine").iterdir()] == [".lock"]
    assert not released(mine()).earlier


def test_the_same_command_finds_its_run_again_and_another_one_is_refused() -> None:
    released(mine())
    assert released(mine(log_steps=3)).earlier
    assert config_file.load(Path("mine/config.yaml")).run.log_steps == 3
    before = Path("mine/config.yaml").read_bytes()
    with pytest.raises(
        UsageError,
        match=r"mine is a run with other settings \(seed: 7, not 0\): type --resume never",
    ):
        mine(seed=7)
    assert Path("mine/config.yaml").read_bytes() == before


def test_resume_never_moves_the_old_run_aside() -> None:
    for number, aside in enumerate((None, "mine.old", "mine.old-2")):
        folder = released(mine(seed=number, resume="never"))
        assert not folder.earlier
        if aside:
            assert folder.notes == (f"the earlier run in mine is now in {aside}",)
            assert config_file.load(Path(aside) / "config.yaml").seed == number - 1
    assert config_file.load(Path("mine/config.yaml")).seed == 2


def test_what_is_no_run_folder_is_not_touched() -> None:
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("important")
    for resume in ("auto", "never"):
        with pytest.raises(UsageError, match="mine is not empty and not a run of hvd_train"):
            mine(resume=resume)
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.tex"]
    Path("file").write_text("x")
    with pytest.raises(UsageError, match="cannot use the output folder file: Not a directory"):
        mine(output_dir=Path("file"))


def test_a_folder_in_which_another_process_trains_is_refused() -> None:
    other = mine()
    for resume in ("auto", "never"):
        with pytest.raises(Busy, match="another process is training in mine"):
            mine(resume=resume)
    assert [path.name for path in Path().iterdir()] == ["mine"]
    released(other)
    assert released(mine()).earlier


def test_the_same_command_finds_its_own_unfinished_run() -> None:
    found = released(own(0))
    released(own(1, seed=5, resume="never"))
    released(own(2, recipe="digits2"))
    finished = released(own(5, resume="never"))
    (finished.path / run_folder.SUMMARY).write_text("{}")
    busy = own(6, resume="never")
    again = released(own(7))
    assert (again.path, again.earlier) == (found.path, True)
    (found.path / run_folder.SUMMARY).write_text("{}")
    fresh = released(own(8))
    assert (fresh.path, fresh.earlier) == (Path("runs/digits-20260102-120800"), False)
    again = released(own(8, resume="never"))
    assert again.path == Path("runs/digits-20260102-120800-2")
    released(busy)


def test_a_folder_is_taken_back_from_a_process_that_does_not_react() -> None:
    """The stopped process can see that it has lost its claim."""
    stopped = mine()
    assert stopped.held()
    taken = mine(evict=True)
    assert not stopped.held()
    assert taken.held()
    assert taken.earlier
    stopped.release()
    with pytest.raises(Busy):
        mine()
    taken.release()


def first(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, other: Callable[[], object]
) -> None:
    """Let another process act just before the first call of a function, which
    may be another one's later.
    """
    call = getattr(module, name)

    def called(*given, **options):
        monkeypatch.setattr(module, name, call)
        other()
        return call(*given, **options)

    monkeypatch.setattr(module, name, called)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_lock_of_a_folder_that_was_moved_aside_does_not_count(
    resume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command makes a new folder between the opening of the lock file and the lock."""
    released(mine())
    others = []
    first(monkeypatch, fcntl, "flock", lambda: others.append(mine(resume="never")))
    with pytest.raises(Busy):
        mine(resume=resume)
    assert others[0].held()
    assert sorted(path.name for path in Path().iterdir()) == ["mine", "mine.old"]
    others[0].release()


def test_a_lock_that_was_replaced_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic job takes its folder back, and the process that it has evicted ends,
    while another job locks it.
    """
    evicted = mine()
    others = []

    def take_over():
        others.append(mine(evict=True))
        evicted.release()

    first(monkeypatch, fcntl, "flock", take_over)
    with pytest.raises(Busy):
        mine()
    assert others[0].held()
    others[0].release()


def test_two_commands_of_one_second_have_two_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    others = []
    first(monkeypatch, Path, "mkdir", lambda: others.append(own(0)))
    assert own(0).path != others[0].path
    others[0].release()


def test_a_run_that_began_meanwhile_is_not_overwritten() -> None:
    """Another command has begun and ended a run while this one read its data."""
    with pytest.raises(Busy):
        mine(lambda _: released(mine()) and None, seed=1)
    assert config_file.load(Path("mine/config.yaml")).seed == 0


def test_a_busy_folder_of_another_job_is_skipped_and_noted() -> None:
    busy = own(0)
    with pytest.raises(Busy) as refused:
        claim(DIGITS, NOON, wait=True)
    assert refused.value.path == busy.path
    fresh = released(own(1))
    assert fresh.notes == (
        f"{busy.path} has the same settings and is being trained by another job; this is a new run",
    )
    released(busy)


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "checkpoints"])
def test_a_run_folder_with_a_planted_link_is_not_taken(name: str) -> None:
    """Symlink or hard link: its target stays as it is."""
    released(mine())
    Path("outside").write_text("precious")
    path = Path("mine", name)
    is_written_in_place = name != "checkpoints"
    for link in (path.symlink_to, path.hardlink_to)[: 1 + is_written_in_place]:
        path.unlink(missing_ok=True)
        link(Path("outside").resolve())
        with pytest.raises(
            UsageError, match=f"mine/{name} is a symlink or a device: remove it, or name another"
        ):
            mine()
    assert Path("outside").read_text() == "precious"


def test_a_folder_of_another_user_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless --output-dir names it: the other user may have planted it."""
    planted = released(own(0)).path
    assert released(own(1)).path == planted
    if os.geteuid() == 0:
        for entry in (planted, Path("runs")):
            os.chown(entry, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    assert released(own(1)).path != planted
    assert released(own(2, output_dir=planted)).path == planted

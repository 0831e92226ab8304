"""Which run folder a command means, and who may train in it."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from hvd_train import Config, config_file
from hvd_train.errors import UsageError
from hvd_train.run_files import run_folder
from hvd_train.run_files.run_folder import Busy, RunFolder, claim

ROOT = Path(__file__).parents[3]
NOON = datetime(2026, 1, 2, 12, 0, 0)
LATER = datetime(2026, 1, 2, 12, 0, 1)


def named(**changes: object) -> Config:
    """Return a config with an output folder."""
    return Config().replace(**{"output_dir": Path("mine"), **changes})


def released(folder: RunFolder) -> RunFolder:
    """Give up the claim, as the end of the process that holds it does."""
    folder._lock.close()
    return folder


def test_a_new_folder_is_made_with_its_config() -> None:
    """Its parents are made too, and its config.yaml is that of the run."""
    folder = claim(named(output_dir=Path("a/b/mine")), NOON)
    assert (folder.path, folder.earlier, folder.notes) == (Path("a/b/mine"), False, ())
    assert config_file.load(Path("a/b/mine/config.yaml")) == named(output_dir=Path("a/b/mine"))
    released(folder)


def test_an_empty_folder_is_taken() -> None:
    """Job scripts make the folder beforehand."""
    Path("mine").mkdir()
    assert not released(claim(named(), NOON)).earlier


def test_the_same_command_finds_its_run_again() -> None:
    """Settings that may change within a run may differ, and the new ones are written."""
    released(claim(named(), NOON))
    again = released(claim(named(log_steps=3), LATER))
    assert again.earlier
    assert config_file.load(Path("mine/config.yaml")).run.log_steps == 3


def test_another_config_is_refused_with_the_fields_that_differ() -> None:
    """The error names the two ways out, and the folder stays untouched."""
    released(claim(named(), NOON))
    before = Path("mine/config.yaml").read_bytes()
    with pytest.raises(UsageError, match=r"mine is a run with other settings \(seed: 7, not 0\): type --resume never"):
        claim(named(seed=7), LATER)
    assert Path("mine/config.yaml").read_bytes() == before


def test_resume_never_moves_the_old_run_aside() -> None:
    """Nothing is overwritten: each old run is kept under a name of its own."""
    for number, aside in enumerate((None, "mine.old", "mine.old-2")):
        folder = released(claim(named(seed=number, resume="never"), NOON))
        assert not folder.earlier
        if aside:
            assert folder.notes == (f"the earlier run in mine is now in {aside}",)
            assert config_file.load(Path(aside) / "config.yaml").seed == number - 1
    assert config_file.load(Path("mine/config.yaml")).seed == 2


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_folder_of_something_else_is_not_touched(resume: str) -> None:
    """It is neither used nor moved."""
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("important")
    with pytest.raises(UsageError, match="mine is not empty and not a run of hvd_train"):
        claim(named(resume=resume), NOON)
    assert sorted(path.name for path in Path("mine").iterdir()) == ["thesis.tex"]


def test_a_file_is_refused() -> None:
    """The error asks for a folder."""
    Path("mine").write_text("x")
    with pytest.raises(UsageError, match="mine is a file; name a folder"):
        claim(named(), NOON)


def test_a_place_that_cannot_be_written_is_refused() -> None:
    """The error has the system's reason and what to type."""
    Path("file").write_text("x")
    with pytest.raises(UsageError, match=r"cannot use the output folder file/mine: Not a directory; choose another"):
        claim(named(output_dir=Path("file/mine")), NOON)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_folder_in_which_another_process_trains_is_refused(resume: str) -> None:
    """It is neither shared nor moved away; once the other process has ended it can be claimed."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.unit.run_files.test_run_folder import *\n"
        "folder = claim(named(), NOON); print('claimed', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(Busy, match="another process is training in mine"):
            claim(named(resume=resume), LATER)
        assert [path.name for path in Path().iterdir()] == ["mine"]
    finally:
        other.stdin.close()
        other.wait(30)
        other.stdout.close()
    assert released(claim(named(), LATER)).earlier


def test_without_a_name_a_run_gets_the_time() -> None:
    """It is runs/RECIPE-TIME; two runs of the same second get names of their own."""
    unnamed = Config().replace(recipe="digits", resume="never")
    first, second = claim(unnamed, NOON), claim(unnamed, NOON)
    assert [folder.path for folder in (first, second)] == [
        Path("runs/digits-20260102-120000"), Path("runs/digits-20260102-120000-2"),
    ]  # fmt: skip
    released(first)
    released(second)


def test_the_same_command_finds_its_own_unfinished_run() -> None:
    """A finished run, one with other settings, one of another recipe and one that is being trained are passed over."""
    mine = Config().replace(recipe="digits")
    found = released(claim(mine, NOON))
    for number, other in enumerate((mine.replace(seed=5, resume="never"), mine.replace(recipe="digits2"))):
        released(claim(other, LATER.replace(minute=number)))
    finished = released(claim(mine.replace(resume="never"), LATER.replace(minute=5)))
    (finished.path / run_folder.SUMMARY).write_text("{}")
    busy = claim(mine.replace(resume="never"), LATER.replace(minute=6))
    again = released(claim(mine, LATER.replace(minute=7)))
    assert (again.path, again.earlier) == (found.path, True)
    (found.path / run_folder.SUMMARY).write_text("{}")
    fresh = released(claim(mine, LATER.replace(minute=8)))
    assert (fresh.path, fresh.earlier) == (Path("runs/digits-20260102-120801"), False)
    released(busy)


def test_a_folder_with_nothing_but_our_lock_is_taken(tmp_path: Path) -> None:
    """A process that was killed right after it had made the folder does not make the folder unusable."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").touch()
    claimed = run_folder.claim(Config().replace(output_dir=folder), datetime.now())
    assert (claimed.path, claimed.earlier) == (folder, False)
    claimed.release()


def test_a_released_folder_can_be_claimed_again(tmp_path: Path) -> None:
    """A program may train into one folder twice, one run after the other."""
    config = Config().replace(output_dir=tmp_path / "run")
    run_folder.claim(config, datetime.now()).release()
    run_folder.claim(config, datetime.now()).release()


def test_a_folder_is_taken_back_from_a_process_that_does_not_react() -> None:
    """The stopped process loses its claim and can see that; the new one keeps the folder until it gives it up."""
    stopped = claim(named(), NOON)
    assert stopped.held()
    run_folder.take_over(stopped.path)
    assert not stopped.held()
    taken = claim(named(), NOON)
    assert taken.held()
    assert taken.earlier
    with pytest.raises(Busy):
        claim(named(), NOON)
    stopped.release()
    with pytest.raises(Busy):
        claim(named(), NOON)


@pytest.mark.parametrize("resume", ["auto", "never", "a/file.ckpt"])
@pytest.mark.parametrize("output_dir", [None, Path("mine")])
def test_a_job_that_starts_again_finds_its_own_folder(resume: str, output_dir: Path | None) -> None:
    """Though it is neither the newest nor unfinished, and though the command says to start anew."""
    config = Config().replace(recipe="digits", resume=resume, output_dir=output_dir)
    released(claim(config, NOON))
    own = released(claim(config, NOON, owner="job"))
    (own.path / run_folder.SUMMARY).write_text("{}")
    released(claim(Config().replace(recipe="digits", resume="never"), LATER, owner="another"))
    again = released(claim(config, LATER.replace(minute=1), owner="job"))
    assert (again.path, again.earlier, again.notes) == (own.path, True, ())


def test_a_job_that_has_lost_its_folder_to_another_run_does_not_take_it_back() -> None:
    """The folder belongs to whoever has claimed it last."""
    own = released(claim(named(), NOON, owner="job"))
    assert run_folder.belongs_to(own.path, "job")
    released(claim(named(), LATER))
    assert not run_folder.belongs_to(own.path, "job")
    assert not run_folder.belongs_to(own.path, "")


def test_a_folder_that_is_taken_over_stays_that_of_the_job() -> None:
    """A job that dies right after it still finds its folder."""
    stopped = claim(named(resume="never"), NOON, owner="job")
    run_folder.take_over(stopped.path, "job")
    again = released(claim(named(resume="never"), LATER, owner="job"))
    assert (again.path, again.earlier) == (stopped.path, True)
    stopped.release()


def test_a_busy_folder_of_another_job_is_passed_over_and_said() -> None:
    """The user learns that this is a new run; a caller that would rather wait gets the folder's name instead."""
    mine = Config().replace(recipe="digits")
    busy = claim(mine, NOON, owner="another")
    with pytest.raises(Busy) as refused:
        claim(mine, LATER, owner="job", wait=True)
    assert refused.value.path == busy.path
    fresh = released(claim(mine, LATER, owner="job"))
    assert fresh.notes == (f"{busy.path} has the same settings and is being trained by another job; this is a new run",)
    with pytest.raises(Busy):
        claim(mine, LATER, owner="another")
    released(busy)


@pytest.mark.parametrize("output_dir", [None, Path("mine")])
def test_a_job_waits_for_those_that_have_lost_the_process_with_the_folder(output_dir: Path | None) -> None:
    """They may be about to commit; they claim the folder themselves for that, and so does who has waited enough."""
    config = Config().replace(recipe="digits", output_dir=output_dir)
    path = released(claim(config, NOON)).path
    assert released(claim(config, LATER, wait=True)).earlier
    one, other = run_folder.stay(path), run_folder.stay(path)
    assert one is not None
    assert other is not None
    one.close()
    with pytest.raises(Busy) as refused:
        claim(config, LATER, wait=True)
    assert refused.value.path == path
    assert released(claim(config, LATER)).path == path
    other.close()
    assert released(claim(config, LATER, wait=True)).path == path


def test_a_run_whose_members_still_commit_is_not_moved_away() -> None:
    """They would write into the folder of the new run, which has the name of theirs."""
    config = named(resume="never")
    member = run_folder.stay(released(claim(config, NOON)).path)
    assert member is not None
    with pytest.raises(Busy):
        claim(config, LATER, wait=True)
    assert [path.name for path in Path().iterdir()] == ["mine"]
    member.close()
    released(claim(config, LATER, wait=True))
    assert {path.name for path in Path().iterdir()} == {"mine", "mine.old"}


def test_without_a_folder_nobody_is_waited_for() -> None:
    """A host that does not have the folder, or whose file system has no locks, trains all the same."""
    assert run_folder.stay(Path("missing")) is None


@pytest.mark.parametrize(
    "name", [".lock", ".members", "metrics.jsonl", "config.yaml.partial", "tensorboard", "checkpoints", "model-best.pt"]
)
def test_a_run_folder_with_a_link_is_not_taken(name: str) -> None:
    """What a run would write there would land in what the link leads to, which stays as it is."""
    released(claim(named(), NOON))
    Path("outside").write_text("precious")
    Path("mine", name).unlink(missing_ok=True)
    Path("mine", name).symlink_to(Path("outside").resolve())
    with pytest.raises(UsageError, match=f"mine/{name} is a link or a device, .* remove it, or name another"):
        claim(named(), LATER)
    assert Path("outside").read_text() == "precious"


def test_a_file_that_goes_while_it_is_looked_at_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that had the folder before may still be ending a commit: the job goes on all the same."""
    released(claim(named(), NOON))
    Path("mine/step.ckpt.partial").write_text("half")
    look = Path.lstat

    def look_late(path: Path) -> os.stat_result:
        if path.name == "step.ckpt.partial":
            path.unlink()
        return look(path)

    monkeypatch.setattr(Path, "lstat", look_late)
    assert released(claim(named(), LATER)).earlier
    assert not Path("mine/step.ckpt.partial").exists()


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "ledger.jsonl"])
def test_a_file_with_two_names_is_not_written(name: str) -> None:
    """A hard link is as good as a link to somebody who wants another file to be emptied."""
    released(claim(named(), NOON))
    Path("outside").write_text("precious")
    Path("mine", name).unlink(missing_ok=True)
    Path("mine", name).hardlink_to("outside")
    with pytest.raises(UsageError, match=f"mine/{name} is a link"):
        claim(named(), LATER, owner="job")
    assert Path("outside").read_text() == "precious"


def test_a_planted_lock_alone_is_not_followed() -> None:
    """A folder that holds nothing but our lock is taken, unless that is a link: the error names it."""
    Path("outside").write_text("precious")
    Path("mine").mkdir()
    Path("mine/.lock").symlink_to(Path("outside").resolve())
    with pytest.raises(UsageError, match=r"cannot use the output folder mine/.lock: it is a link"):
        claim(named(), NOON, owner="job")
    assert Path("outside").read_text() == "precious"


def test_a_planted_lock_names_no_owner() -> None:
    """A link to a lock of our job does not make a folder ours."""
    Path("mine").mkdir()
    Path("elsewhere").write_text("job")
    Path("mine/.lock").symlink_to("../elsewhere")
    assert not run_folder.belongs_to(Path("mine"), "job")
    Path("mine/.lock").unlink()
    Path("mine/.lock").write_text("job")
    assert run_folder.belongs_to(Path("mine"), "job")


def test_nobody_stays_by_a_planted_link() -> None:
    """A file outside of the folder is not made."""
    Path("mine").mkdir()
    Path("mine/.members").symlink_to("../outside")
    assert run_folder.stay(Path("mine")) is None
    assert not Path("outside").exists()


def test_a_folder_of_another_user_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user has not named it: somebody may have planted it. The note says how to go on in it."""
    mine = Config().replace(recipe="digits")
    planted = released(claim(mine, NOON)).path
    assert released(claim(mine, LATER)).path == planted
    for entry in (planted, Path("runs")):
        if os.geteuid() == 0:
            os.chown(entry, 65534, 65534)
    if os.geteuid() != 0:
        monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    fresh = released(claim(mine, LATER))
    assert fresh.path != planted
    assert fresh.notes == (
        f"{planted} belongs to another user and is passed over; to go on in it, type --output-dir {planted}",
    )
    assert released(claim(mine.replace(output_dir=planted), LATER)).path == planted


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_a_link_of_another_user_is_passed_over() -> None:
    """A name in `runs` that somebody else has made may lead anywhere, to a run of one's own, too."""
    mine = Config().replace(recipe="digits")
    link = released(claim(mine, NOON)).path
    link.symlink_to(link.rename("elsewhere").resolve())
    assert released(claim(mine, LATER)).path == link
    os.chown(link, 65534, 65534, follow_symlinks=False)
    assert released(claim(mine, LATER)).path != link


def test_a_run_goes_on_longer() -> None:
    """Its config has the new number of epochs, and no summary says any more that it has come to its end."""
    constant = named(schedule="constant", epochs=10)
    released(claim(constant, NOON))
    Path("mine/summary.json").write_text("{}")
    longer = constant.replace(epochs=20)
    again = released(claim(longer, LATER))
    assert (again.earlier, again.notes) == (True, ("mine goes on to epoch 20, and not to 10 as before",))
    assert config_file.load(Path("mine/config.yaml")) == longer
    assert not Path("mine/summary.json").exists()
    assert released(claim(longer, LATER)).notes == ()


@pytest.mark.parametrize(
    ("summary", "ended"),
    [
        (None, False),
        ('{"finished": false}', False),
        ('{"finished": true}', True),
        ("{}", True),
        ("[]", True),
        ("{", True),
    ],
)
def test_a_run_that_a_time_limit_has_stopped_goes_on(summary: str | None, ended: bool) -> None:
    """Its summary says that it has not ended: the same command finds it, and a summary of no end is taken away."""
    config = Config().replace(recipe="digits")
    path = released(claim(config, NOON)).path
    if summary is not None:
        (path / "summary.json").write_text(summary)
    assert run_folder.has_ended(path) == ended
    assert (released(claim(config, LATER)).path == path) == (not ended)
    assert (path / "summary.json").exists() == ended


def test_a_run_with_more_time_has_not_ended() -> None:
    """Its summary goes, so that the run is found again should it be killed."""
    released(claim(named(total_time="1h"), NOON))
    Path("mine/summary.json").write_text('{"finished": true}')
    released(claim(named(total_time="1h"), LATER))
    assert Path("mine/summary.json").exists()
    released(claim(named(total_time="2h"), LATER))
    assert not Path("mine/summary.json").exists()


def test_an_unfinished_run_of_fewer_epochs_is_another_run() -> None:
    """Nobody has named it: the command that began another run is still to find that one, and not to change this one."""
    constant = Config().replace(recipe="digits", schedule="constant", epochs=20)
    mine = released(claim(constant, NOON)).path
    shorter = released(claim(constant.replace(epochs=5), LATER)).path
    assert shorter != mine
    before = (shorter / "config.yaml").read_bytes()
    assert released(claim(constant, LATER)).path == mine
    assert (shorter / "config.yaml").read_bytes() == before


@pytest.mark.parametrize("change", [{}, {"patience": 2}])
def test_a_run_that_an_aim_has_ended_goes_on_with_another_aim_only(change: dict[str, Any]) -> None:
    """It would end at once again; what is refused leaves the folder as it was."""
    patient = named(schedule="constant", epochs=10, patience=1)
    released(claim(patient, NOON))
    Path("mine/summary.json").write_text('{"why": "nothing better since epoch 3"}')
    before = Path("mine/config.yaml").read_bytes()
    if not change:
        with pytest.raises(UsageError, match=r"mine ended before its last epoch \(nothing better since epoch 3\)"):
            claim(patient.replace(epochs=20), LATER)
        assert (Path("mine/config.yaml").read_bytes(), Path("mine/summary.json").exists()) == (before, True)
    else:
        assert released(claim(patient.replace(epochs=20, **change), LATER)).earlier


@pytest.mark.parametrize("weights", ["", "model-best.pt", "model-final.pt"])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "one-cycle"])
def test_a_run_whose_learning_rate_follows_its_epochs_does_not_go_on_longer(schedule: str, weights: str) -> None:
    """It would not be what a run of as many epochs is. The error has two lines to type, and nothing is changed."""
    released(claim(named(schedule=schedule, epochs=10), NOON))
    Path("mine/summary.json").write_text("{}")
    if weights:
        Path("mine", weights).write_text("weights")
    before = Path("mine/config.yaml").read_bytes()
    with pytest.raises(UsageError) as refused:
        claim(named(schedule=schedule, epochs=20), LATER)
    assert f"mine is a run to epoch 10: its learning rate followed from that number (--schedule {schedule})" in str(
        refused.value
    )
    assert "type --resume never" in str(refused.value)
    assert (f"or --weights mine/{weights} --output-dir OTHER" in str(refused.value)) == bool(weights)
    assert Path("mine/config.yaml").read_bytes() == before
    assert Path("mine/summary.json").exists()


@pytest.mark.parametrize("changes", [{"epochs": 9}, {"epochs": 20, "seed": 1}])
def test_a_shorter_or_another_run_is_not_a_longer_one(changes: dict[str, int]) -> None:
    """Fewer epochs may be done already, and another seed is another run: all that differs is named."""
    released(claim(named(schedule="constant", epochs=10), NOON))
    with pytest.raises(UsageError, match="mine is a run with other settings") as refused:
        claim(named(schedule="constant", **changes), LATER)
    assert f"epochs: {changes['epochs']}, not 10" in str(refused.value)


def test_the_folder_that_resume_names_is_the_output_folder() -> None:
    """Whatever it is called now. A folder that is no run, and two folders, are refused."""
    released(claim(named(), NOON))
    Path("mine").rename("moved")
    meant = Config().replace(resume="moved")
    assert run_folder.named_by_resume(meant) == Config().replace(output_dir=Path("moved"))
    assert run_folder.named_by_resume(meant.replace(output_dir=Path.cwd() / "moved")).run.resume == "auto"
    for unchanged in (Config(), Config().replace(resume="never"), Config().replace(resume="a/file.ckpt")):
        assert run_folder.named_by_resume(unchanged) == unchanged
    with pytest.raises(UsageError, match="--resume moved goes on in that folder, and --output-dir names another"):
        run_folder.named_by_resume(meant.replace(output_dir=Path("other")))
    Path("empty").mkdir()
    with pytest.raises(UsageError, match=r"--resume empty is not a run of hvd_train: it has no config\.yaml"):
        run_folder.named_by_resume(Config().replace(resume="empty"))


def test_the_newest_run_is_the_one_that_was_written_to_last(capsys: pytest.CaptureFixture[str]) -> None:
    """Not the one with the last name; which one it is is said. Without a run that is a mistake."""
    with pytest.raises(UsageError, match="there is no run in runs/: name a run folder"):
        run_folder.newest()
    for number, name in enumerate(("b", "c", "a", "d")):
        Path("runs", name).mkdir(parents=True)
        for file in ("config.yaml", "metrics.jsonl") if name != "d" else ("notes.txt",):
            Path("runs", name, file).touch()
            os.utime(Path("runs", name, file), (number, number))
    assert run_folder.newest() == Path("runs/a")
    os.utime("runs/b/metrics.jsonl", (7, 7))
    assert run_folder.newest() == Path("runs/b")
    assert capsys.readouterr().err == "hvd-train: the newest run: runs/a\nhvd-train: the newest run: runs/b\n"

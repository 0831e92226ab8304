"""Copies of a run's commits in a remote folder, made by a thread beside training, and how one is brought back."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hvd_train import plain_file, weights_file
from hvd_train.console import printable
from hvd_train.errors import UsageError
from hvd_train.run_files import durable, remote, run_folder
from hvd_train.run_files.durable import Permission
from hvd_train.run_files.remote import COMMITS, OWNER, Commit, Damaged, Remote, RemoteFile

NOTE = ".remote.json"
"""What a working folder says about itself: which life of a run it holds, and whether a commit of it was ever copied."""
STALLED_S = 120.0
"""How long the end of a run waits while nothing moves."""
_SHOWN_S = 10.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # between two tries ...
_LONGEST_PAUSE_AWAITED_S = 5.0  # ... and where the end of the run waits for them

Report = Callable[[str], None]


class _OwnerLost(Exception):
    """Another process copies to the same place, with who that is."""


class Copies:
    """Copies each newest commit of a folder in a thread of its own. Training never waits for it, but at its end."""

    def __init__(self, place: Remote, folder: Path, keep: int, job: str, permission: Permission) -> None:
        """Prepare to copy `folder`, of which the newest `keep` commits stay at `place`; nothing is sent yet.

        `job` names the elastic job of this process, and nothing is copied where `permission` says no.
        """
        self.url = place.url
        self._place, self._folder, self._keep = place, folder, max(2, keep)
        self._job, self._permission = job, permission
        self._token = secrets.token_hex(4)
        self._report: Report = lambda message: None
        self._claimed = False
        self._number = 0
        self._commits: list[Commit] = []  # that have a manifest, newest first
        self._objects: set[str] = set()  # that may be there
        self._copied: dict[str, tuple[object, RemoteFile]] = {}  # each file as it was when it was copied
        self._changed = threading.Condition()
        self._asked = self._answered = 0
        self._over = self._failing = self._awaited = self._hurry = False
        self._keeps_all = False  # whether it was said that older commits cannot be removed
        self._run = ""
        self._moved_bytes = self._total_bytes = 0
        self._moved_at = time.monotonic()
        self._thread: threading.Thread | None = None

    def claim(self) -> str | None:
        """Become the one that copies to this place, and return what the user should know. Raises what fsspec raises.

        Whoever has copied there before stops when it notices.
        """
        names = self._place.names()
        note = None
        if OWNER in names:
            with suppress(Damaged, ValueError, AttributeError, FileNotFoundError):
                before = json.loads(self._place.read(OWNER))
                if before.get("job") != self._job or not self._job:
                    whom, since = (printable(before.get(name))[:100] for name in ("host", "since"))
                    told = f"is taken over from {whom}, which began at {since} and has not said that it ended"
                    note = f"{self._place.url} {told}: it copies nothing there any more"
        self._commits = list(self._place.commits(lambda message: None))
        damaged = remote.manifests(names) - {commit.manifest for commit in self._commits}
        self._number = max(map(remote.number_of, remote.manifests(names)), default=0)
        unfinished = {name for name in names if name.endswith(durable.PARTIAL_SUFFIX)}
        self._objects = self._place.objects() | damaged | unfinished
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        owner = {"token": self._token, "job": self._job, "host": socket.gethostname(), "since": since}
        self._place.write(OWNER, json.dumps(owner).encode())
        self._claimed = True
        return note

    def start(self, report: Report) -> None:
        """Begin to copy; `report` takes sentences for the user."""
        self._report = report
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Have the newest commit copied as soon as the one before is done."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def wait(self) -> bool:
        """Wait until all that is in the folder now is copied, and return whether it is.

        It is given up where nothing moves for a while; that and a line about how far it is are shown to the user.
        """
        if self._thread is None:
            return True
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._awaited = self._hurry = True
            self._changed.notify_all()
        begin = shown = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._answered >= mine or self._over, timeout=0.5)
                if self._answered >= mine:
                    return True
                if self._over:
                    return False
            now = time.monotonic()
            if now - max(begin, self._moved_at) > STALLED_S:
                self._end()
                self._report(
                    f"{self._place.url} is behind: nothing could be copied there for {STALLED_S:.0f} s; all is in "
                    f"{self._folder}, and the same command on this machine copies it"
                )
                return False
            if now - shown > _SHOWN_S:
                shown = now
                done, total = self._moved_bytes / 1e6, self._total_bytes / 1e6
                self._report(f"waiting for the copy to {self._place.url}: {done:,.1f} of {total:,.1f} MB")

    def close(self, report: Report) -> None:
        """Copy what is left, as `wait` does, and stop; what there is to say goes to `report` from here on."""
        self._report = report
        if self._thread is None:
            return
        if self.wait():
            with suppress(Exception):  # it only says that nobody is there any more
                if self._owner() == self._token:
                    self._place.remove(OWNER)
        self._end()
        self._thread.join(timeout=1.0)  # one that hangs in a library ends with the process

    def _end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _work(self) -> None:
        pause_s = 0.0
        while True:
            with self._changed:
                if pause_s:
                    self._changed.wait_for(lambda: self._over or self._hurry, timeout=pause_s)
                    self._hurry = False
                else:
                    self._changed.wait_for(lambda: self._over or self._asked > self._answered)
                if self._over:
                    return
                asked = self._asked
            try:
                self._copy_newest()
            except _OwnerLost as error:
                self._report(f"{error}; nothing more is copied to {self._place.url}, and training goes on")
                self._end()
                return
            except Exception as error:  # noqa: BLE001  # each library has its own, and training must go on
                most_s = _LONGEST_PAUSE_S if not self._awaited else _LONGEST_PAUSE_AWAITED_S
                pause_s = min(most_s, 2 * pause_s or _SHORTEST_PAUSE_S)
                if not self._failing:
                    self._failing = True
                    told = "training goes on, and it is tried again and again"
                    self._report(f"cannot copy to {self._place.url}: {remote.why(error)}; {told}")
                continue
            pause_s = 0.0
            if self._failing:
                self._failing = False
                self._report(f"copies to {self._place.url} work again: step {self._commits[0].step} is there")
            with self._changed:
                self._answered = asked
                self._changed.notify_all()

    def _copy_newest(self) -> None:
        """Copy the newest commit, unless that is done. Raises _OwnerLost, and what fsspec raises."""
        if not self._claimed:
            self.claim()
        number = self._number + 1
        files: dict[str, RemoteFile] = {}
        copied: dict[str, tuple[object, RemoteFile]] = {}
        self._moved_bytes, self._total_bytes = 0, sum(path.stat().st_size for path in self._paths() if path.exists())
        # The checkpoint first: what is written into the folder meanwhile is of steps after it, and cut off on resume.
        for path in self._paths():
            name = path.relative_to(self._folder).as_posix()
            try:
                with plain_file.opened(path) as file:
                    status = os.fstat(file.fileno())
                    signature = (status.st_ino, status.st_size, status.st_mtime_ns)
                    before = self._copied.get(name)
                    if before is not None and before[0] == signature:
                        copied[name] = before
                        self._moved(status.st_size)
                    else:
                        at = f"{COMMITS}/{number:012d}-{self._token}/{name}"
                        self._objects.add(at)
                        size, digest = self._place.upload(file, status.st_size, at, self._moved)
                        copied[name] = (signature, RemoteFile(name, at, size, digest))
            except FileNotFoundError:
                if path.exists():  # it was the remote folder that is missing
                    raise
                continue  # a newer one has taken its place
            files[name] = copied[name][1]
        if not any(name.startswith("checkpoints/") for name in files):
            if self._newest_checkpoint() is None:
                return
            raise FileNotFoundError("the checkpoint was removed while it was copied")
        if self._commits and set(files.values()) == set(self._commits[0].files):
            return
        if not self._permission():
            raise _OwnerLost(f"another process has taken over {self._folder}")
        if (owner := self._owner()) != self._token:
            how = "was taken over by another process" if owner else f"has no {OWNER} any more"
            raise _OwnerLost(f"{self._place.url} {how}")
        commit = Commit(remote.manifest_name(number, self._token), self._run_of_folder(), tuple(files.values()))
        self._place.write(commit.manifest, commit.text().encode())
        self._number, self._copied = number, copied
        self._commits.insert(0, commit)
        with suppress(OSError):
            self._write_note(copied=True)
        try:
            self._remove_old()
        except Exception as error:  # noqa: BLE001  # the commit is there all the same
            if not self._keeps_all:
                self._keeps_all = True
                self._report(
                    f"cannot remove older commits from {self._place.url}: {remote.why(error)}; they stay there"
                )

    def _remove_old(self) -> None:
        """Remove what no commit that is kept names; manifests first, so that none names what is gone.

        Of several commits of one checkpoint the newest stays: those that are kept must not all depend on one object.
        """
        kept: dict[int, Commit] = {}
        for commit in self._commits:
            if len(kept) < self._keep:
                kept.setdefault(commit.step, commit)
        for old in [commit for commit in self._commits if commit not in kept.values()]:
            self._place.remove(old.manifest)
            self._commits.remove(old)
        named = {file.at for commit in self._commits for file in commit.files}
        for at in sorted(self._objects - named):
            self._place.remove(at)
            self._objects.discard(at)

    def _paths(self) -> Iterator[Path]:
        """Yield the files of the newest commit in the folder, its checkpoint first."""
        checkpoint = self._newest_checkpoint()
        if checkpoint is not None:
            yield checkpoint
        for name in (weights_file.BEST, weights_file.FINAL):
            if weights := weights_file.found_in(self._folder, name):
                yield weights
        weights_names = {Path(weights_file.BEST).stem, Path(weights_file.FINAL).stem}
        for path in sorted((*self._folder.glob("*"), *self._folder.glob("tensorboard/*"))):
            name = path.relative_to(self._folder).as_posix()
            with suppress(FileNotFoundError):
                if remote.is_plain(name) and path.stem not in weights_names and stat.S_ISREG(path.lstat().st_mode):
                    yield path

    def _newest_checkpoint(self) -> Path | None:
        return max(self._folder.glob("checkpoints/step-??????????.ckpt"), key=lambda path: path.name, default=None)

    def _owner(self) -> str:
        """Return the token of whoever copies to this place now; empty where nobody says so."""
        try:
            return str(json.loads(self._place.read(OWNER))["token"])
        except FileNotFoundError:
            return ""

    def _run_of_folder(self) -> str:
        if not self._run:
            before = note_of(self._folder)
            self._run = before["run"] if before else secrets.token_hex(16)
            self._write_note(copied=bool(before and before.get("copied")))
        return self._run

    def _write_note(self, *, copied: bool) -> None:
        """Write into the folder which life of a run it holds, and whether it was `copied`. Raises OSError."""
        note = {"url": self._place.url, "run": self._run, "copied": copied}
        if note != note_of(self._folder):
            durable.write_text(self._folder / NOTE, json.dumps(note) + "\n", self._permission)

    def _moved(self, num_bytes: int) -> None:
        self._moved_bytes += num_bytes
        self._moved_at = time.monotonic()


def note_of(folder: Path) -> dict[str, Any] | None:
    """Return what a working folder says about itself, or None."""
    try:
        note = json.loads(plain_file.read_text(folder / NOTE, 2**16))
        return note if isinstance(note["run"], str) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def bring(
    place: Remote,
    folder: Path,
    owner: str,
    report: Report,
    *,
    goes_on: bool,
    step_in: Callable[[Path], int],
    with_checkpoint: bool = True,
) -> None:
    """Bring the working folder up to the newest whole commit at `place`, unless it has that or a later one.

    `step_in` returns the step of the newest whole checkpoint in a folder, -1 without any. A folder that holds another
    life of the run is moved aside. Raises UsageError where a run is there and this one, which does not go on
    (`goes_on`), would take its place, where something else is there, and where no commit is whole; Busy where another
    process has the folder, and what fsspec raises where the place cannot be reached.
    """
    names = place.names()
    if not remote.is_ours(names):
        raise UsageError(f"--output-dir {place.url} is not empty and not a run of hvd_train; name another folder")
    commits = list(place.commits(report))
    ours = _belongs_to_job(place, names, owner)
    if commits and not (goes_on or ours):
        raise UsageError(
            f"--output-dir {place.url} holds a run already, which is not moved aside there: name another folder, or "
            "leave out --resume to go on with it"
        )
    if not commits and remote.manifests(names):
        raise UsageError(f"{place.url}: there is no whole commit; name another --output-dir, or remove what is there")
    check_private(folder)
    mine = run_folder.belongs_to(folder, owner)
    with run_folder.take_lock(folder, owner if mine else ""):
        note = note_of(folder)
        if not commits:
            if note is not None and note.get("copied"):
                report(f"{place.url} was emptied: what was here of it is now in {_move_aside(folder)}")
            return
        same = note is not None and note["run"] == commits[0].run
        have = step_in(folder) if same else -1
        for commit in commits:
            if have >= commit.step:
                return
            fresh = folder.with_name(f"{folder.name}.fetched")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(mode=0o700)
            report(f"fetching step {commit.step} from {place.url}")
            try:
                place.fetch(commit, fresh, lambda name: with_checkpoint or not name.startswith("checkpoints/"))
            except Damaged as error:
                report(f"skipping a damaged commit in {place.url}: {error}")
                continue
            durable.write_text(fresh / NOTE, json.dumps({"url": place.url, "run": commit.run, "copied": True}) + "\n")
            if ours or mine:
                (fresh / run_folder.LOCK).write_text(owner)
            if not same and (folder / run_folder.CONFIG).exists():
                report(f"the earlier run in {folder} is now in {_move_aside(folder)}")
            else:
                gone = folder.with_name(f"{folder.name}.replaced")
                shutil.rmtree(gone, ignore_errors=True)
                folder.rename(gone)
            fresh.rename(folder)
            shutil.rmtree(folder.with_name(f"{folder.name}.replaced"), ignore_errors=True)
            return
        if have < 0:
            raise UsageError(f"{place.url}: no commit there is whole; name another --output-dir")


def _belongs_to_job(place: Remote, names: list[str], owner: str) -> bool:
    if not owner or OWNER not in names:
        return False
    try:
        return bool(json.loads(place.read(OWNER)).get("job") == owner)
    except (Damaged, ValueError, AttributeError, FileNotFoundError):
        return False


def _move_aside(folder: Path) -> Path:
    aside = run_folder.free_name(folder.with_name(f"{folder.name}.old"))
    folder.rename(aside)
    return aside


def check_private(folder: Path) -> None:
    """Make a working folder where it is missing. Raises UsageError where it is a link or another user's."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        foreign = run_folder.is_foreign(folder) or folder.is_symlink()
    except OSError as error:
        raise UsageError(f"cannot work on a remote run in {folder}: {error.strerror}") from None
    if foreign:
        raise UsageError(f"{folder}, where the remote run is worked on, is a link or another user's: remove it")

"""A run folder in object storage: what a manifest may say, and what is fetched."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_train.errors import UsageError
from hvd_train.run_files import remote
from hvd_train.run_files.remote import Damaged, Remote, fetch_newest, parse

NAME = "manifest-000000000007-0123abcd.json"
FOLDER = "commits/000000000007-0123abcd"


def entry(name: str, content: bytes = b"x", **changes: Any) -> dict[str, Any]:
    """What a manifest says about a file."""
    digest = hashlib.blake2b(content, digest_size=32).hexdigest()
    return {"name": name, "at": f"{FOLDER}/{name}", "size": len(content), "digest": digest, **changes}


def manifest(*files: dict[str, Any], **changes: Any) -> bytes:
    """A manifest with a config, a checkpoint and these files."""
    known = [entry("config.yaml"), entry("checkpoints/step-0000000012.ckpt")]
    return json.dumps({"format": 1, "run": "0" * 32, "files": [*known, *files], **changes}).encode()


def place() -> Remote:
    """An empty remote folder."""
    return Remote(f"file://{Path.cwd()}/remote")


def stored(at: Remote, *files: dict[str, Any], content: bytes = b"x") -> None:
    """A commit in the remote folder, whose files all hold the same."""
    text = manifest(*files)
    for file in json.loads(text)["files"]:
        at.write(file["at"], content)
    at.write(NAME, text)


def test_a_commit_knows_its_step() -> None:
    """What a manifest says is read back."""
    commit = parse(NAME, manifest(entry("tensorboard/events.out.tfevents.1.host.2.0")))
    assert commit.step == 12
    assert parse(NAME, commit.text().encode()) == commit


@pytest.mark.parametrize(
    "content",
    [
        manifest()[:-20],
        b"",
        b"[" * 100_000,
        b"\xff",
        manifest(format=2),
        manifest(run="../.."),
        manifest(files=[entry("config.yaml")]),
        manifest(files=[entry("checkpoints/step-0000000012.ckpt")]),
        manifest(files=3),
        manifest(entry("config.yaml")),
        manifest({"name": "metrics.jsonl"}),
        manifest(entry("metrics.jsonl", size=-1)),
        manifest(entry("metrics.jsonl", size=1.5)),
        manifest(entry("metrics.jsonl", digest=None)),
        *(
            manifest(entry(name))
            for name in (
                "../x",
                "a/../../x",
                "/etc/x",
                ".lock",
                "checkpoints/..",
                "a\\b",
                "x\n",
                "export/model.pt2",
                "",
            )
        ),
        *(
            manifest(entry("metrics.jsonl", at=at))
            for at in ("../other/metrics.jsonl", "metrics.jsonl", f"{FOLDER}/config.yaml", f"{FOLDER}/../metrics.jsonl")
        ),
    ],
)
def test_a_manifest_that_we_would_not_write_is_refused(content: bytes) -> None:
    """Whoever can write there has no say beyond the run: no name leads anywhere else."""
    with pytest.raises(Damaged, match="manifest-0"):
        parse(NAME, content)


def test_a_commit_is_fetched_as_it_was_written() -> None:
    """All files or the wanted ones, and nothing that it does not name."""
    at = place()
    stored(at, entry("metrics.jsonl"), entry("empty.json", b""))
    at.write(f"{FOLDER}/empty.json", b"")
    at.write(f"{FOLDER}/extra.json", b"x")
    folder = Path("here")
    folder.mkdir()
    (folder / "left.json").touch()
    (commit,) = at.commits(pytest.fail)
    at.fetch(commit, folder)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {"config.yaml", "checkpoints/step-0000000012.ckpt", "metrics.jsonl", "empty.json"}
    at.fetch(commit, folder, lambda name: name == "config.yaml")
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("content", [b"y", b"xx", b"", None])
def test_a_file_that_is_not_what_the_manifest_says_is_recognised(content: bytes | None) -> None:
    """Changed, longer, shorter or gone; it never gets its name here."""
    at = place()
    stored(at)
    if content is None:
        at.remove(f"{FOLDER}/config.yaml")
    else:
        at.write(f"{FOLDER}/config.yaml", content)
    (commit,) = at.commits(pytest.fail)
    Path("here").mkdir()
    with pytest.raises(Damaged, match=r"config\.yaml"):
        at.fetch(commit, Path("here"))
    assert not list(Path("here").rglob("config.yaml*"))


def test_what_is_larger_than_the_disk_is_not_begun() -> None:
    """Nor is a manifest read that is larger than any of ours."""
    at = place()
    stored(at, entry("metrics.jsonl", size=10**18))
    (commit,) = at.commits(pytest.fail)
    Path("here").mkdir()
    with pytest.raises(Damaged, match="has not the size"):
        at.fetch(commit, Path("here"))
    at.write(NAME, b" " * 2**23)
    told: list[str] = []
    assert list(at.commits(told.append)) == []
    assert told == [f"skipping a damaged manifest in {at.url}: {NAME} is larger than 4,194,304 bytes"]


def test_readers_take_the_newest_whole_commit() -> None:
    """Damaged ones are named; without any there is one line that says so."""
    at = place()
    stored(at)
    newer = manifest().replace(b"000000000007", b"000000000008").replace(b"0000000012", b"0000000013")
    at.write(NAME.replace("7", "8"), newer)
    Path("here").mkdir()
    told: list[str] = []
    assert fetch_newest(at.url, Path("here"), lambda name: True, told.append).step == 12
    assert len(told) == 1
    assert told[0].startswith(f"skipping a damaged commit in {at.url}: commits/000000000008-0123abcd/")
    at.remove(NAME)
    with pytest.raises(UsageError, match=r"there is no whole commit of a run of hvd_train; skipping a damaged"):
        fetch_newest(at.url, Path("here"), lambda name: True, told.append)


def test_what_is_missing_for_a_protocol_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to type; nothing is sent for it."""
    with pytest.raises(UsageError, match=r"^--output-dir nosuch://x/run: unknown protocol 'nosuch'"):
        remote.check("nosuch://x/run")
    for module in [name for name in sys.modules if name.partition(".")[0] in ("s3fs", "gcsfs")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UsageError, match=r"^--output-dir gs://b/run: .* missing: pip install 'hvd_train\[gcs\]'$"):
        remote.check("gs://b/run")


def test_no_secret_is_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither keys of the environment nor what stands in an address; it is one short line."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame")
    text = "cannot reach http://me:pass@host/x?X-Amz-Signature=abc with sesame\nsecond" + "x" * 500
    told = remote.why(OSError(text))
    assert told.startswith("cannot reach http://***@host/x with ***")
    assert len(told) < 250
    assert "\n" not in told
    assert remote.why(TimeoutError()) == "TimeoutError"


def test_work_that_hangs_ends_in_time() -> None:
    """With what it returned or raised, where it ends."""
    assert remote.within(60, lambda: 3) == 3
    with pytest.raises(KeyError):
        remote.within(60, lambda: {}[1])
    with pytest.raises(TimeoutError, match=r"no answer within 0 s"):
        remote.within(0.01, lambda: time.sleep(1))

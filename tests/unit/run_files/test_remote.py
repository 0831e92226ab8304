"""The copy of a run at another file system (`--copy-to`)."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hvd_train.errors import UsageError
from hvd_train.run_files import remote
from hvd_train.run_files.ledger import audit
from hvd_train.run_files.remote import Copies
from hvd_train.run_files.run_folder import RunFolder
from hvd_train.world.world import LocalWorld
from tests.support.runs import equal, small_config, trained
from tests.support.worlds import StoppingWorld, run_ranks

URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def storage() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def test_an_empty_machine_continues_the_run_to_the_bit(capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(output_dir=Path("alone"), epochs=2, ledger=True, commit_steps=3)
    _, expected = trained(LocalWorld(), config)
    trained(StoppingWorld(after=7), config.replace(output_dir=Path("one"), copy_to=URL))
    result, weights = trained(LocalWorld(), config.replace(output_dir=Path("two"), copy_to=URL))
    assert (result.finished, audit(Path("two")).faults) == (True, ())
    assert equal(weights, expected)
    assert "resuming at epoch 1, step 7" in capsys.readouterr().out


def names(folder: str) -> set[str]:
    paths = fsspec.filesystem("memory").find(f"/bucket/run/{folder}")
    return {Path(path).name for path in paths}


def test_a_url_as_run_folder_is_copied_from_a_folder_of_that_name() -> None:
    trained(LocalWorld(), small_config(output_dir=Path(URL), epochs=1, commit_steps=2))
    here = {path.name for path in Path("runs/memory/bucket/run/checkpoints").iterdir()}
    # how many commits there were depends on the speed of the disk
    assert names("checkpoints") == here != set()
    assert {"config.yaml", "metrics.jsonl", "summary.json", "model-final.pt"} <= names("")
    assert ".lock" not in names("")


def test_what_a_link_shows_is_not_copied() -> None:
    Path("key").write_text("secret")
    Path("one/tensorboard").mkdir(parents=True)
    Path("one/tensorboard/planted").symlink_to(Path("key").resolve())
    Path("one/tensorboard/own").touch()
    job("one").close()
    assert names("tensorboard") == {"own"}


def test_a_run_is_not_fetched_through_a_link(storage: Any) -> None:
    storage.pipe("/bucket/run/config.yaml", b"")
    Path("precious").mkdir()
    Path("two.fetched").symlink_to("precious")
    with pytest.raises(UsageError, match="cannot fetch the run"):
        Copies(URL, Path("two"), print).fetch()
    assert not list(Path("precious").iterdir())


def test_a_name_that_leaves_the_folder_is_refused(storage: Any) -> None:
    for name in ("config.yaml", "../../planted"):
        storage.store[f"/bucket/run/{name}"] = storage.open("/x", "wb")
    with pytest.raises(UsageError, match="would be outside of the folder"):
        Copies(URL, Path("two"), print).fetch()
    assert not Path("two").exists()


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("cat_file", ConnectionError("no route to it")),
        ("pipe_file", FileNotFoundError("The specified bucket does not exist")),
    ],
)
def test_a_storage_that_cannot_be_written_is_one_line_at_the_start(
    broken: str, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryFileSystem, broken, Mock(side_effect=error))
    line = rf"--copy-to {URL}: cannot write there \({type(error).__name__}: {error}\)"
    with pytest.raises(UsageError, match=line):
        trained(LocalWorld(), small_config(output_dir=Path("one"), copy_to=URL))
    assert not Path("one").exists()


@pytest.mark.parametrize(("failures", "code"), [(1, 0), (10**9, 74)])
def test_a_storage_that_fails_does_not_end_the_training(
    failures: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But if the last copy fails, all ranks have exit code 74, and the
    same command copies again.
    """
    put = MemoryFileSystem.put_file
    left = [failures]

    def put_file(*given, **options):
        if left[0]:
            left[0] -= 1
            raise ConnectionError("no route to it")
        put(*given, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    config = small_config(output_dir=Path("one"), copy_to=URL, epochs=1, commit_steps=2)
    results = run_ranks(2, lambda world: trained(world, config))
    assert f"--copy-to {URL}: ConnectionError: no route to it; the" in capsys.readouterr().err
    assert {result.exit_code for result, _ in results} == {code}
    if code:
        left[0] = 0
        assert trained(LocalWorld(), config)[0].exit_code == 0
    assert {"summary.json", "model-final.pt"} <= names("")


def job(folder: str, report: Callable[[str], None] = print, *, beats: bool = True) -> Copies:
    """Return the copies of a job that has claimed this folder; it shows no
    sign of life without `beats`.
    """
    copies = Copies(URL, Path(folder), report)
    copies.fetch()
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "config.yaml").touch()
    with patch.object(remote, "BEAT_S", 0.01 if beats else 3600):
        copies.begin(RunFolder(Path(folder)))
    return copies


def test_a_url_belongs_to_one_living_job(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one stops with one line, before it changes anything, and continues the run
    once the first has ended.
    """
    monkeypatch.setattr(remote, "BEAT_S", 0.01)
    first = job("one")
    with pytest.raises(
        UsageError,
        match=rf"{URL}: a job on {socket.gethostname()} .* copies there: name another URL",
    ):
        job("two")
    assert not Path("two").exists()
    Path("one/model.pt").write_text("weights")
    first.close()
    second = job("two")
    assert Path("two/model.pt").read_text() == "weights"
    second.close()
    storage.pipe_file("/bucket/config.yaml", b"")
    # a program's folder, with a run in it
    Copies("memory://bucket", Path("whole"), print).fetch()
    Copies(URL, Path("whole/run"), print)
    with pytest.raises(
        UsageError, match="has copied there since: remove one to continue from there"
    ):
        job("one")
    job("two").close()


def test_a_job_that_is_gone_loses_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it was only stopped, it copies and deletes nothing any more."""
    monkeypatch.setattr(remote, "PATIENCE_S", 0.0)
    lines = []
    gone = job("one", lines.append, beats=False)
    Path("one/old").touch()
    second = job("two")
    assert not gone.finish().result()
    assert "the URL now" in lines[-1]
    assert "old" not in names("")
    gone.close()
    second.start()
    second.close()
    assert names("") == {"config.yaml", ".owner.json"}

"""The copy of a run at another file system (`--copy-to`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from hvd_train.errors import UsageError
from hvd_train.run_files import remote
from hvd_train.run_files.ledger import audit
from hvd_train.run_files.run_folder import RunFolder
from hvd_train.world.world import LocalWorld
from tests.support.runs import equal, small_config, trained
from tests.support.worlds import StoppingWorld

URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def storage() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def test_an_empty_machine_continues_the_run_to_the_bit(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"epochs": 2, "ledger": True, "commit_steps": 3}
    _, expected = trained(LocalWorld(), small_config(output_dir=Path("alone"), **settings))
    trained(StoppingWorld(after=7), small_config(output_dir=Path("one"), copy_to=URL, **settings))
    result, weights = trained(LocalWorld(), small_config(output_dir=Path("two"), copy_to=URL, **settings))
    assert (result.finished, audit(Path("two")).faults) == (True, ())
    assert equal(weights, expected)
    assert "resuming at epoch 1, step 7" in capsys.readouterr().out


def names(folder: str) -> set[str]:
    return {path.rpartition("/")[2] for path in fsspec.filesystem("memory").find(f"/bucket/run/{folder}")}


def test_a_url_as_run_folder_is_copied_from_a_folder_of_that_name() -> None:
    trained(LocalWorld(), small_config(output_dir=Path(URL), epochs=1, commit_steps=2))
    here = {path.name for path in Path("runs/memory/bucket/run/checkpoints").iterdir()}
    assert names("checkpoints") == here != set()  # how many commits there were depends on the speed of the disk
    assert {"config.yaml", "metrics.jsonl", "summary.json", "model-final.pt"} <= names("")
    assert ".lock" not in names("")


def test_what_a_link_shows_is_not_copied() -> None:
    Path("key").write_text("secret")
    Path("one/tensorboard").mkdir(parents=True)
    Path("one/tensorboard/planted").symlink_to(Path("key").resolve())
    Path("one/tensorboard/own").touch()
    remote.Copies(URL, RunFolder(Path("one")), print).close()
    assert names("tensorboard") == {"own"}


def test_a_run_is_not_fetched_through_a_link(storage: Any) -> None:
    storage.pipe("/bucket/run/config.yaml", b"")
    Path("precious").mkdir()
    Path("two.fetched").symlink_to("precious")
    with pytest.raises(UsageError, match="cannot fetch the run"):
        remote.fetch(URL, Path("two"), print)
    assert not list(Path("precious").iterdir())


class Broken:
    """A file system without an answer."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError("no route to it")


def test_a_name_that_leaves_the_folder_is_refused(storage: Any) -> None:
    for name in ("config.yaml", "../../planted"):
        storage.store[f"/bucket/run/{name}"] = storage.open("/x", "wb")
    with pytest.raises(UsageError, match="would be outside of the folder"):
        remote.fetch(URL, Path("two"), print)
    assert not Path("two").exists()


def test_a_storage_that_fails_does_not_end_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = remote.Copies(URL, RunFolder(Path("one")), print)
    made._system = Broken()
    Path("one").mkdir()
    Path("one/config.yaml").touch()
    made.close()
    assert capsys.readouterr().out == f"--copy-to {URL}: ConnectionError: no route to it; the next commit tries again\n"
    monkeypatch.setattr(remote, "file_system", lambda url: (Broken(), ""))
    with pytest.raises(UsageError, match=r"cannot fetch the run \(ConnectionError: no route to it\)"):
        remote.fetch(URL, Path("two"), print)

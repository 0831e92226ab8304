"""Run folders that are named by a URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train import Config, config_file, remote_url
from hvd_train.errors import UsageError
from hvd_train.settings.run import RunConfig


def test_a_url_is_told_from_a_path_and_survives_as_one() -> None:
    """A Path has one slash where a URL has two; what is joined to it is part of it; config.yaml has it as typed."""
    for url in ("s3://bucket/runs/first", "gs://bucket/run", "memory://run", "file:///tmp/run"):
        assert remote_url.url_of(url) == remote_url.url_of(Path(url)) == url
        assert remote_url.url_of(Path(url) / "part") == f"{url}/part"
        config = Config(run=RunConfig(output_dir=Path(url)))
        assert config.as_dict()["run"]["output_dir"] == url
        Path("config.yaml").write_text(config_file.dump(config))
        assert config_file.load(Path("config.yaml")) == config
    for path in ("runs/first", "/data/s3://x", "C:/run", "a:b", "."):
        assert remote_url.url_of(path) is None
        assert remote_url.working_folder(Path(path)) == Path(path)


def test_each_url_has_a_working_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the user's cache, or where the variable says."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv(remote_url.FOLDER, raising=False)
    first, second = (remote_url.working_folder(Path(f"s3://{bucket}/run")) for bucket in ("a", "b"))
    assert first != second
    assert first.parent == Path("/cache/hvd_train/remote")
    assert first.name.startswith("run-")
    monkeypatch.setenv(remote_url.FOLDER, "/data")
    assert remote_url.working_folder(Path("s3://a/run")) == Path("/data") / first.name
    assert remote_url.name_of("s3://a/..") == "run"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://me:secret@host/run", "holds a password"),
        ("s3://bucket/run?versionId=1", "has no `?`"),
        ("simplecache::s3://bucket/run", "no `::`"),
        ("s3:///", "names no folder"),
    ],
)
def test_a_url_that_cannot_be_is_one_line_without_its_password(url: str, told: str) -> None:
    """It is refused while the settings are read."""
    with pytest.raises(UsageError, match=told) as error:
        RunConfig(output_dir=Path(url))
    assert "secret" not in str(error.value)
    with pytest.raises(UsageError, match=told) as error:
        RunConfig(resume=url)
    assert "secret" not in str(error.value)

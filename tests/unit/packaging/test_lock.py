"""What is installed is what the locks name: every package, by its version and by the digest of its file."""

from __future__ import annotations

import platform
import re
import sys
import zipfile
from pathlib import Path

import lock
import pytest
from environment_setup.checkout import Checkout, Choice, locks
from environment_setup.steps import Setup, SetupError
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = f"python{sys.version_info[0]}.{sys.version_info[1]}"


def locked(python: str, name: str) -> dict[str, tuple[str, list[str]]]:
    """Return version and digests by package from one lock."""
    text = (lock.REQUIREMENTS / f"python{python}" / f"{name}.txt").read_text().replace("\\\n", " ")
    entries = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {entry[0].split("==")[0]: (entry[0].split("==")[1], entry[1:]) for entry in entries}


@pytest.mark.parametrize("python", lock.PYTHONS)
def test_every_package_has_its_version_and_digests(python: str) -> None:
    """Each package that the lists name is locked, at the version of constraints.txt, with digests and nothing else."""
    versions = {}
    for line in (lock.REQUIREMENTS / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"python_full_version": f"{python}.9"}):
            versions[canonicalize_name(wanted.name)] = str(wanted.specifier).removeprefix("==")
    found = {package: entry for name in lock.LISTS for package, entry in locked(python, name).items()}
    assert {package: version for package, (version, _) in found.items()}.items() <= versions.items()
    for _, digests in [*found.values(), *locked(python, "audit").values()]:
        assert digests
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", digest) for digest in digests)
    for name in lock.LISTS:
        for line in (lock.REQUIREMENTS / f"{name}.txt").read_text().splitlines():
            if text := line.partition("#")[0].strip():
                assert canonicalize_name(Requirement(text).name) in found, text


@pytest.fixture
def setup(checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Return a set-up whose index is a folder with one wheel; its pip only says what it would install."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "harmless-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("harmless.py", "")
        wheel.writestr("harmless-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: harmless\nVersion: 1\n")
        wheel.writestr("harmless-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("harmless-1.dist-info/RECORD", "")
    requirements = checkout.root / "requirements"
    (requirements / HERE).mkdir()
    for file in requirements.glob("*.txt"):
        file.write_text("")
        (requirements / HERE / file.name).write_text("")
    (requirements / "run.txt").write_text("harmless\n")
    (requirements / HERE / "run.txt").write_text(f"harmless==1 --hash=sha256:{'0' * 64}\n")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_DRY_RUN": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(Setup, "pip", lambda self, *arguments: [sys.executable, "-m", "pip", *arguments])
    with (tmp_path / "lock").open("w") as file:
        yield Setup(checkout, None, file)


def test_only_locked_files_are_installed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel of another digest and one that no lock names are refused; HVD_TRAIN_HASHES=no takes versions."""
    site = setup.checkout.venv / "lib" / HERE / "site-packages"
    (site / "torch-1.dist-info").mkdir(parents=True)
    (site / "torch-1.dist-info" / "RECORD").touch()
    setup.checkout.log.parent.mkdir()
    setup.own_temporary.mkdir(parents=True)
    with setup.checkout.log.open("wb") as log:
        with pytest.raises(SetupError, match=r"other files than those whose digests(.|\n)*HVD_TRAIN_HASHES=no make"):
            setup.install_packages(log, site)
        (setup.checkout.root / "requirements" / HERE / "run.txt").write_text("harmless==1\n")
        with pytest.raises(SetupError):
            setup.install_packages(log, site)
        monkeypatch.setenv("HVD_TRAIN_HASHES", "no")
        setup.install_packages(log, site)
    assert setup.checkout.log.read_text().count("Would install harmless-1") == 1


def test_other_processors_have_versions_without_digests(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The locks are for one kind of processor and the supported Pythons."""
    folder = checkout.root / "requirements" / "python3.11"
    folder.mkdir()
    for name in Choice(None, None).requirement_files():
        (folder / name).touch()
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert (locks(checkout, "3.11.7"), locks(checkout, "3.14.0")) == (folder, None)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert locks(checkout, "3.11.7") is None

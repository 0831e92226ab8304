"""What an earlier set-up left: which steps are done, and whether the environment can be used."""

import json
import os
import re
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from environment_setup.checkout import Checkout
from environment_setup.machine import output_of
from environment_setup.preflight import OLDEST_PYTHON

STAMP = "hvd_train.json"


class Stamp:
    """Which steps are done, and where: a file in the environment, so that it goes when that goes."""

    def __init__(self, venv: Path) -> None:
        self.path = venv / STAMP
        self.venv = venv
        self.done: Dict[str, str] = {}
        self.place = ""
        with suppress(OSError, ValueError, AttributeError):
            content = json.loads(self.path.read_text(encoding="utf-8"))
            self.place = str(content.get("place", ""))
            self.done = {str(name): str(key) for name, key in content.get("done", {}).items()}

    def is_done(self, name: str, key: str) -> bool:
        """Whether a step was finished with this key."""
        return self.done.get(name) == key

    def mark(self, name: str, key: str) -> None:
        """A step is finished."""
        self.done[name] = key
        self._write()

    def forget(self, name: str) -> None:
        """A step begins: until it is finished, it is not done."""
        self.done.pop(name, None)
        self._write()

    def _write(self) -> None:
        part = self.path.with_name(STAMP + ".part")
        content = {"place": str(self.venv), "done": self.done}
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(str(part), str(self.path))


def why_anew(checkout: Checkout, chosen: Optional[Tuple[int, int]]) -> Optional[str]:
    """Why the environment there cannot be used; None where it can, an empty text where there is none."""
    if not checkout.venv.is_dir() or not any(checkout.venv.iterdir()):
        return ""
    version = venv_python_version(checkout)
    if version is None:
        return "its python does not run"
    minor = version_pair(version)
    if minor < OLDEST_PYTHON:
        return "it has Python " + version
    if chosen is not None and chosen != minor:
        return "it has Python {}, and PYTHON names {}.{}".format(version, *chosen)
    if not (checkout.venv / "lib" / "python{}.{}".format(*minor)).is_dir():
        return "its packages are for another Python than the one on this machine"
    place = made_at(checkout.venv)
    if place is not None and place != str(checkout.venv):
        return "it was made at " + place
    return None


def venv_python_version(checkout: Checkout) -> Optional[str]:
    """The version of the environment's python; None where it does not run."""
    ask = "import sys, pip; print(sys.version.split()[0])"
    return output_of([str(checkout.python), "-I", "-c", ask]).strip() or None


def made_at(venv: Path) -> Optional[str]:
    """The folder that an environment was made in: its commands hold it as an absolute path."""
    place = Stamp(venv).place
    if place:
        return place
    with suppress(OSError, IndexError, ValueError):
        script = (venv / "bin" / "activate").read_text(encoding="utf-8")
        for found in re.findall(r"^\s*(?:export )?VIRTUAL_ENV=(.+)$", script, re.MULTILINE):
            if not found.startswith("$"):  # as from Python 3.13 on for Windows, before the line for all others
                return shlex.split(found)[0]
    return None


def version_pair(version: str) -> Tuple[int, int]:
    """Major and minor version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def site_packages(checkout: Checkout, python_version: str) -> Path:
    """Where the environment's packages lie."""
    return checkout.venv / "lib" / "python{}.{}".format(*version_pair(python_version)) / "site-packages"


def is_installed(site: Path, name: str) -> bool:
    """Whether a package is there whole: pip writes RECORD last."""
    return any(site.glob(name + "-*.dist-info/RECORD"))


def drop_half_installed(site: Path) -> List[str]:
    """Make pip install again what was cut off: it takes a folder without RECORD as installed."""
    half = [folder for folder in site.glob("*.dist-info") if not (folder / "RECORD").exists()]
    for folder in half:
        shutil.rmtree(str(folder))
    return [folder.name.split("-")[0] for folder in half]

"""What an earlier set-up has left: which steps are done, and whether the environment can be used."""

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
    """The file that says which steps are done, and where; it lies in the environment and is deleted with it."""

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
        """Return whether a step was finished with this key."""
        return self.done.get(name) == key

    def mark(self, name: str, key: str) -> None:
        """Note that a step is finished."""
        self.done[name] = key
        self._write()

    def forget(self, name: str) -> None:
        """Note that a step is not done, since it begins anew."""
        self.done.pop(name, None)
        self._write()

    def _write(self) -> None:
        part = self.path.with_name(STAMP + ".part")
        content = {"place": str(self.venv), "done": self.done}
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(str(part), str(self.path))


def why_anew(checkout: Checkout, chosen: Optional[Tuple[int, int]]) -> Optional[str]:
    """Return why the environment cannot be used: None where it can, "" where there is none."""
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
    """Return the version of the environment's Python, or None where it does not run."""
    ask = "import sys, pip; print(sys.version.split()[0])"
    return output_of([str(checkout.python), "-I", "-c", ask]).strip() or None


def made_at(venv: Path) -> Optional[str]:
    """Return the folder in which an environment was made, or None where it does not say so.

    An environment cannot be moved, since its commands hold that folder as an absolute path.
    """
    place = Stamp(venv).place
    if place:
        return place
    with suppress(OSError, IndexError, ValueError):
        script = (venv / "bin" / "activate").read_text(encoding="utf-8")
        for found in re.findall(r"^\s*(?:export )?VIRTUAL_ENV=(.+)$", script, re.MULTILINE):
            if not found.startswith("$"):  # from Python 3.13 on, a line for Windows comes before the one for others
                return shlex.split(found)[0]
    return None


def version_pair(version: str) -> Tuple[int, int]:
    """Return major and minor version of a version such as 3.11.4."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def site_packages(checkout: Checkout, python_version: str) -> Path:
    """Return the folder of the environment's packages."""
    return checkout.venv / "lib" / "python{}.{}".format(*version_pair(python_version)) / "site-packages"


def is_installed(site: Path, name: str) -> bool:
    """Return whether a package is installed completely: pip writes its file RECORD last."""
    return any(site.glob(name + "-*.dist-info/RECORD"))


def drop_half_installed(site: Path) -> List[str]:
    """Delete the traces of packages whose installation was interrupted, and return their names.

    Otherwise pip would take them as installed.
    """
    half = [folder for folder in site.glob("*.dist-info") if not (folder / "RECORD").exists()]
    for folder in half:
        shutil.rmtree(str(folder))
    return [folder.name.split("-")[0] for folder in half]

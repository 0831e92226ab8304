"""Python.h: whether the compiler finds it, and how to fetch it without root from Debian."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import IO, Iterable, List

from environment_setup.machine import cache_home
from environment_setup.show import note_command


def has_python_headers(compiler: List[str], folders: Iterable[Path] = ()) -> bool:
    """Return whether the compiler finds Python.h, by itself or in these folders.

    The compiler is asked, so that CPATH and similar settings count. Without a compiler, look for the file.
    """
    include = sysconfig.get_path("include")
    if not compiler:
        return any((Path(folder) / "Python.h").exists() for folder in [include, *map(str, folders)])
    options = ["-I{}".format(folder) for folder in [include, *folders]]
    command = [*compiler, *options, "-x", "c++", "-E", "-"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet) as process:
        process.communicate(b"#include <Python.h>\n")
    return process.returncode == 0


def headers_problem() -> str:
    """Return the line that says what to type where Python.h is missing."""
    line = "there is no Python.h for Python {}.{} (Horovod is an extension module): apt install {}"
    return line.format(*sys.version_info[:2], package_of_python("-dev"))


def is_system_python() -> bool:
    """Return whether this is the Python that the system's package manager installed."""
    return os.path.realpath(sys.executable) == os.path.realpath("/usr/bin/python3")


def package_of_python(suffix: str) -> str:
    """Return the name of the Debian package that adds a part to this Python: "-dev" or "-venv"."""
    version = "3" if is_system_python() else "{}.{}".format(*sys.version_info[:2])
    return "python" + version + suffix


def headers_folder() -> Path:
    """Return the folder that keeps headers fetched without root."""
    return cache_home() / "hvd_train" / "headers" / "python{}.{}".format(*sys.version_info[:2])


def foreign_headers() -> List[str]:
    """Return a line if that folder is a link or another user's: what is in it would be compiled in here."""
    folder = headers_folder()
    for place in (folder.parent.parent, folder.parent, folder):
        if place.is_symlink() or (place.exists() and place.stat().st_uid != os.geteuid()):
            what = "{}: it is a link, or belongs to another user, whose code would run here as yours".format(place)
            return [what + ": remove it, or name another folder: XDG_CACHE_HOME=$HOME/.cache"]
    return []


def fetched_headers() -> List[Path]:
    """Return the folders of fetched headers, for CPATH."""
    include = headers_folder() / "usr" / "include"
    return [include / "python{}.{}".format(*sys.version_info[:2]), include]


def can_fetch_headers() -> bool:
    """Return whether Debian's tools are there, which fetch packages without root, and its headers fit this Python."""
    return is_system_python() and all(shutil.which(tool) for tool in ("apt-get", "dpkg"))


def fetch_headers(log: IO[bytes]) -> bool:
    """Fetch and unpack Debian's package of Python's headers, and return whether that succeeded."""
    package = "libpython{}.{}-dev".format(*sys.version_info[:2])
    folder = headers_folder()
    part = folder.with_name("{}.{}.part".format(folder.name, os.getpid()))
    lists = part / "lists"
    folder.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # the mode is that of hvd_train/ alone
    for empty in (lists / "partial", part / "archives" / "partial"):
        empty.mkdir(parents=True, exist_ok=True)
    # The system's lists of packages may be empty, as in images, or old: then fetch private ones and try again.
    private = ["-o", "Dir::State::lists={}/".format(lists), "-o", "Dir::Cache={}/".format(part)]
    try:
        for options in ([], private):
            if options and not run_quietly(["apt-get", *options, "update"], log, cwd=part):
                break
            if run_quietly(["apt-get", *options, "download", package], log, cwd=part):
                archive = next(part.glob(package + "_*.deb"))
                if not run_quietly(["dpkg", "-x", str(archive), "tree"], log, cwd=part):
                    break
                shutil.rmtree(str(folder), ignore_errors=True)
                (part / "tree").rename(folder)
                return True
        return False
    finally:
        shutil.rmtree(str(part), ignore_errors=True)


def run_quietly(command: List[str], log: IO[bytes], cwd: Path) -> bool:
    """Run a command with its output in the log, and return whether it succeeded."""
    note_command(command, log)
    stdin, stderr = subprocess.DEVNULL, subprocess.STDOUT
    return subprocess.call(command, stdin=stdin, stdout=log, stderr=stderr, cwd=str(cwd)) == 0

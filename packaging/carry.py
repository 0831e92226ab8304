#!/usr/bin/env python3
"""Make the files to carry to a machine with GPUs and without a network, for its `make gpu-check`.

    python packaging/carry.py --dry-run                       the plan: which steps there are, and what is done already
    python packaging/carry.py --only source,wheels,package    what takes a minute or two
    python packaging/carry.py --there there.txt               all of it, an hour of processor time

`--there` names the output of `python3 -m pip list --format=freeze` on that machine: what it has is not carried. Without
it only torch, torchvision and their own packages count as there. The others have the versions and digests of
requirements/. The files come to build/carry (`--folder`), with a README.txt that says what to type there; the work is
done in build/carry-work, and a step that was done before with the same commands is not done again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 64 << 20
OF_TORCH = r"torch|torchvision|triton|cuda-.*|nvidia-.*|sympy|mpmath|networkx|fsspec|setuptools"
"""What comes with torch and is large, or is there wherever torch is."""
LEFT_OUT = {"mpi4py"}  # the Horovod that is carried has no MPI
README = """\
In the folder with these files, on the machine with the GPU:

    mkdir hvd_train && tar -xzf source.tar.gz -C hvd_train
    {python} -m venv --system-site-packages hvd_train/.venv
    hvd_train/.venv/bin/python -m pip install --no-index --no-deps *.whl
    {python} -m zipfile -e hvd_train-*.whl hvd_train      # the compiled part of the decoder of JPEG files
    cd hvd_train
    LD_PRELOAD=$PWD/../libnccl.so.2 .venv/bin/python -m benchmarks.gpu_check --folder ../checked

Without libnccl.so.2 (and LD_PRELOAD) the NCCL of torch is used; before 2.30 it lets no ranks share a GPU.
Bring back the folder `checked`. What it has: docs/gpu-check.md.
"""


@dataclass(frozen=True)
class Step:
    """A part of the work: commands, run one after another in the checkout."""

    name: str
    what: str
    commands: tuple[tuple[str, ...], ...]
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """What stands for all that the step does."""
        return hashlib.sha256(repr((self.commands, self.variables)).encode()).hexdigest()


class CarryError(Exception):
    """An error that the user can mend."""


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the command line; a wrong one ends the process with a usage message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", default="python3.12", help="of the same minor version as there (default: python3.12)"
    )
    parser.add_argument("--torch", default="2.11.0", help="the version there (default: 2.11.0)")
    parser.add_argument("--cuda", default="13.0", help="of the torch there (default: 13.0)")
    parser.add_argument("--arch", default="90", help="compute capability of the GPUs there (default: 90, of an H100)")
    parser.add_argument("--nccl", default="v2.30.7-1", help="tag of NCCL's source (default: v2.30.7-1)")
    parser.add_argument("--nccl-source", default="https://github.com/NVIDIA/nccl", help="a git repository or a clone")
    parser.add_argument("--there", type=Path, help="what is installed there, as pip list --format=freeze prints it")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "carry", help="for the files (default: build/carry)"
    )
    parser.add_argument("--only", help="some of the steps, with commas between them")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and do nothing")
    options = parser.parse_args(arguments)
    for name, form in (("torch", r"\d+\.\d+\.\d+"), ("cuda", r"\d+\.\d+"), ("arch", r"\d+"), ("nccl", r"[\w.-]+")):
        if not re.fullmatch(form, getattr(options, name)):
            parser.error(f"--{name} {getattr(options, name)}: it has another form, as in {parser.get_default(name)}")
    if options.there and not options.there.is_file():
        parser.error(f"--there: there is no file {options.there}")
    return options


def missing_there(lock: str, there: str) -> str:
    """Return the entries of a lock, with their digests, that are neither in `there` nor come with torch."""
    names = {canonical(name) for name in re.findall(r"^([A-Za-z0-9_.-]+)==", there, re.MULTILINE)}
    entries = re.findall(r"^[A-Za-z0-9].*(?:\n +--hash=.*)*\n", lock, re.MULTILINE)
    wanted = []
    for entry in entries:
        name = canonical(entry.partition("==")[0])
        if name not in names | LEFT_OUT and not re.fullmatch(OF_TORCH, name):
            wanted.append(entry)
    return "".join(wanted)


def canonical(name: str) -> str:
    """Return the one way to write the name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def steps(options: argparse.Namespace, work: Path) -> list[Step]:
    """Return all steps, in their order."""
    out, env, source = options.folder, work / f"env-{minor_of(options.python)}", work / "source"
    archive, python = out / "source.tar.gz", str(env / "bin" / "python")
    pip = (python, "-m", "pip", "--disable-pip-version-check", "-q")
    exact = ("--no-deps", "--only-binary", ":all:", "--require-hashes")
    toolkit = env / "lib" / f"python{minor_of(options.python)}" / "site-packages" / "nvidia" / f"cu{options.cuda[:2]}"
    nccl = work / f"nccl-{options.nccl}"
    gencode = f"-gencode=arch=compute_{options.arch},code=sm_{options.arch}"
    build = (f"CUDA_HOME={toolkit}", f"CUDA_LIB={toolkit / 'lib'}", f"NVCC_GENCODE={gencode}")
    jobs = str(len(os.sched_getaffinity(0)))
    library = nccl / "build" / "lib" / "libnccl.so.2"
    return [
        Step(
            "python",
            "an environment of that Python",
            ((options.python, "-m", "venv", str(env)), (*pip, "install", "setuptools", "wheel")),
        ),
        Step("source", "this commit", (("git", "archive", "--format=tar.gz", "-o", str(archive), "HEAD"),)),
        Step(
            "wheels",
            "packages that are missing there",
            ((*pip, "download", *exact, "-r", str(work / "missing.txt"), "-d", str(out)),),
        ),
        Step(
            "package",
            "a wheel of hvd_train",
            (
                ("rm", "-rf", str(source)),
                ("mkdir", str(source)),
                ("tar", "-xzf", str(archive), "-C", str(source)),
                (*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)),
            ),
        ),
        Step(
            "torch",
            "torch as it is there, and a CUDA compiler (4 GB)",
            ((*pip, "install", f"torch=={options.torch}", f"cuda-toolkit[nvcc,cccl,cudart]=={options.cuda}.*"),),
        ),
        Step(
            "horovod",
            f"a wheel of Horovod for sm_{options.arch}, without MPI (10 minutes)",
            ((python, "packaging/build_horovod.py", "--without-mpi", "--wheel-dir", str(out)),),
            (("HOROVOD_BUILD_CUDA_CC_LIST", options.arch),),
        ),
        Step(
            "nccl",
            f"NCCL {options.nccl} for sm_{options.arch} (half an hour)",
            (
                ("rm", "-rf", str(nccl)),
                ("git", "clone", "-q", "--depth", "1", "--branch", options.nccl, options.nccl_source, str(nccl)),
                ("make", "-s", "-C", str(nccl), f"-j{jobs}", "src.build", *build),
                ("strip", "--strip-unneeded", "-o", str(out / "libnccl.so.2"), str(library)),
            ),
        ),
    ]


def minor_of(python: str) -> str:
    """Return the version, such as 3.12, of a Python. Raises CarryError where it does not run."""
    try:
        command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise CarryError(f"there is no {python} that runs; name one: --python PATH") from None


def lock_of(python: str) -> Path:
    """Return the lock of a Python. Raises CarryError where there is none, or no such Python."""
    lock = ROOT / "requirements" / f"python{minor_of(python)}" / "run.txt"
    if not lock.exists():
        raise CarryError(f"{python} is Python {minor_of(python)}, which is not one of 3.10 to 3.13")
    return lock


def chosen(options: argparse.Namespace, all_steps: list[Step]) -> list[Step]:
    """Return the steps that were asked for. Raises CarryError for one that there is not."""
    if options.only is None:
        return all_steps
    names = options.only.split(",")
    if unknown := [name for name in names if name not in {step.name for step in all_steps}]:
        raise CarryError(f"--only: there is no step {unknown[0]!r}; they are {', '.join(s.name for s in all_steps)}")
    return [step for step in all_steps if step.name in names]


def do(step: Step, work: Path) -> None:
    """Do a step, unless that was done before. Raises CarryError, with the end of its log, where it fails."""
    done, log = work / f"{step.name}.done", work / f"{step.name}.log"
    with log.open("wb") as output:
        for command in step.commands:
            environ = {**os.environ, **dict(step.variables)}
            result = subprocess.run(command, cwd=ROOT, env=environ, stdout=output, stderr=output, check=False)
            if result.returncode != 0:
                lines = log.read_text(errors="replace").splitlines()[-4:]
                raise CarryError(f"{step.name}: `{shlex.join(command)}` failed; {log}:\n  " + "\n  ".join(lines))
    done.write_text(step.key)


def is_done(step: Step, work: Path) -> bool:
    """Return whether a step was done with the same commands. Those whose input may have changed are not."""
    done = work / f"{step.name}.done"
    return step.name not in ("source", "wheels", "package") and done.exists() and done.read_text() == step.key


def check_size(folder: Path) -> str:
    """Return what all files weigh. Raises CarryError, with the heaviest, where that is more than MOST_BYTES."""
    sizes = sorted(((path.stat().st_size, path.name) for path in folder.iterdir()), reverse=True)
    total = sum(size for size, _ in sizes)
    listed = ", ".join(f"{name} {size / 2**20:.1f}" for size, name in sizes[:5])
    if total > MOST_BYTES:
        raise CarryError(f"{total / 2**20:.1f} MiB are more than {MOST_BYTES >> 20}: {listed}; name what is --there")
    return f"{len(sizes)} files, {total / 2**20:.1f} MiB: {listed}"


def main(arguments: list[str]) -> int:
    """Do the steps that were asked for; return 0, 1 where one has failed, or 2 where the plan cannot be made."""
    options = parse_options(arguments)
    options.folder = options.folder.resolve()
    work = options.folder.with_name(f"{options.folder.name}-work")
    try:
        plan = chosen(options, steps(options, work))
        missing = missing_there(lock_of(options.python).read_text(), options.there.read_text() if options.there else "")
    except CarryError as error:
        print(f"carry: {error}", file=sys.stderr)
        return 2
    print(f"carry: for {options.python}, torch {options.torch}, CUDA {options.cuda}, sm_{options.arch}")
    print(f"carry: missing there: {', '.join(re.findall(r'^[^ ]+==[^ ]+', missing, re.MULTILINE)) or 'nothing'}")
    if options.dry_run:
        for step in plan:
            print(f"carry: {step.name}: {step.what}: {'done before' if is_done(step, work) else 'to do'}")
            print("\n".join(f"    {shlex.join(command)}" for command in step.commands))
        return 0
    for folder in (options.folder, work):
        folder.mkdir(parents=True, exist_ok=True)
    (work / "missing.txt").write_text(missing)
    (options.folder / "README.txt").write_text(README.format(python=f"python{minor_of(options.python)}"))
    try:
        for step in plan:
            print(f"carry: {step.name}: {step.what}: {'done before' if is_done(step, work) else 'doing'}", flush=True)
            if not is_done(step, work):
                do(step, work)
        print(f"carry: {options.folder}: {check_size(options.folder)}")
    except CarryError as error:
        print(f"carry: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The decoder of JPEG parts under sanitizers: seeds, and changed copies of them for as long as one likes.

    python -m tests.support.fuzz [SECONDS] [SEED]        `make fuzz` runs it (FUZZ_SECONDS=600, SEED=0)

An input that makes a sanitizer speak is kept in build/fuzz/found.jpg. Mend the decoder, and put the file among the
seeds (tests/support/jpeg_seeds/), which a unit test decodes.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from hvd_train.data import pictures

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "fuzz_jpeg.c"
SEEDS = sorted((HERE / "jpeg_seeds").glob("*.jpg"))
_FLAGS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
_LEFT = "the decoder and its driver need a C compiler with sanitizers: apt install gcc"


def built(folder: Path, source: Path = SOURCE) -> Path:
    """Return the driver, compiled into this folder. Raises CalledProcessError or FileNotFoundError."""
    compiler = shlex.split(os.environ.get("CC", "gcc"))
    program = folder / "fuzz_jpeg"
    command = [*compiler, *_FLAGS, str(source), "-o", str(program), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def run(program: Path, seconds: int, seed: int = 0, seeds: list[Path] = SEEDS) -> subprocess.CompletedProcess[str]:
    """Decode the seeds and, for so many seconds, changed copies; an input that fails lies in found.jpg beside."""
    found = program.with_name("found.jpg")
    found.unlink(missing_ok=True)
    command = [program, pictures.library_path(), str(seconds), str(seed), found, *seeds]
    return subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")


def main(arguments: list[str]) -> int:
    """Run for the given seconds, and return 0 where nothing was found."""
    seconds, seed = int((arguments or ["600"])[0]), int((arguments[1:] or ["0"])[0])
    folder = Path("build/fuzz")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        program = built(folder)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"fuzz: {_LEFT}\n{getattr(error, 'stderr', '')}", file=sys.stderr)
        return 2
    done = run(program, seconds, seed)
    if done.returncode == 0:
        print(f"fuzz: {done.stdout.strip()} of {len(SEEDS)} seeds in {seconds} s, seed {seed}: nothing found")
        return 0
    print(done.stderr, file=sys.stderr)
    print(f"fuzz: exit code {done.returncode}; the input is {folder}/found.jpg (seed {seed})", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

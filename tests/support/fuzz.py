"""The decoder of JPEG parts under sanitizers: seeds, and changed copies of them for as long as one likes.

    python -m tests.support.fuzz [SECONDS] [SEED]        `make fuzz` runs it (FUZZ_SECONDS=600, SEED=0)

An input that makes a sanitizer report is kept in build/fuzz/found.jpg. Fix the decoder, and put the file among the
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
SEEDS = sorted((HERE / "jpeg_seeds").glob("*.jpg"))
_FLAGS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def main(seconds: str = "600", seed: str = "0") -> int:
    """Decode the seeds and, for this many seconds, changed copies; return 0 if nothing was found."""
    folder = Path("build/fuzz")
    folder.mkdir(parents=True, exist_ok=True)
    program, found = folder / "fuzz_jpeg", folder / "found.jpg"
    found.unlink(missing_ok=True)
    compiler = shlex.split(os.environ.get("CC", "gcc"))  # with sanitizers: apt install gcc
    subprocess.run([*compiler, *_FLAGS, str(HERE / "fuzz_jpeg.c"), "-o", str(program), "-ldl"], check=True)
    code = subprocess.run([program, pictures.library_path(), seconds, seed, found, *SEEDS], check=False).returncode
    end = f"exit code {code}; the input is {found}" if code else f"nothing found with {len(SEEDS)} seeds"
    print(f"fuzz: {end} ({seconds} s, seed {seed})")
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

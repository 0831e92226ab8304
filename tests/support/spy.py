"""Another user of the machine, who reads the command lines and environments in /proc."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE

OTHER_USER = 65534
_PROGRAM = """
import glob, json, os, select, sys
words = {name: bytes.fromhex(word) for name, word in json.loads(sys.stdin.readline()).items()}
seen = {}
print(os.getuid(), flush=True)
while not select.select([sys.stdin], [], [], 0.003)[0]:
    for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                text = file.read()
        except OSError:
            continue
        for name, word in words.items():
            if word in text:
                seen.setdefault(name, {})[path] = text.replace(b"\\0", b" ").decode("utf-8", "replace")[:300]
print(json.dumps(seen))
"""


@dataclass
class Spy:
    """What another user has seen, once the block of `spying` is over: for each name the places with their texts."""

    seen: dict[str, dict[str, str]] = field(default_factory=dict)


@contextmanager
def spying(words: dict[str, bytes]) -> Iterator[Spy]:
    """Let another user look for these words repeatedly during this block. Needs root."""
    line = ["setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
    line += [str(Path(sys.executable).resolve()), "-I", "-S", "-c", _PROGRAM]
    environment = {"PATH": os.environ["PATH"]}  # not what it is to look for
    found = Spy()
    with subprocess.Popen(line, stdin=PIPE, stdout=PIPE, text=True, cwd="/", env=environment) as process:
        process.stdin.write(json.dumps({name: word.hex() for name, word in words.items()}) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{OTHER_USER}\n"
        try:
            yield found
        finally:
            output, _ = process.communicate()
        found.seen = json.loads(output)


def spellings(name: str, secret: bytes) -> dict[str, bytes]:
    """Return these bytes plain, in hexadecimal and within base64, as a command line may have them."""
    within = [base64.b64encode(bytes(shift) + secret)[(8 if shift else 0) : -4] for shift in range(3)]
    return {
        name: secret,
        f"{name} in hexadecimal": secret.hex().encode(),
        **{f"{name} in base64, {shift}": word for shift, word in enumerate(within)},
    }


def plant_key(folder: Path, key: bytes) -> Path:
    """Return a PYTHONPATH in which each random key of 32 bytes is this one."""
    assert len(key) == 32
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import os\nos.urandom = lambda size, real=os.urandom: {key!r} if size == 32 else real(size)\n"
    )
    return folder


def places(spy: Spy, names: Sequence[str]) -> str:
    return "\n".join(f"{name}: {path}: {text}" for name in names for path, text in spy.seen.get(name, {}).items())

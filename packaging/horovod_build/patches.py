"""The patches of the release: read them, apply them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from horovod_build.errors import BuildError

PATCH_DIR = Path(__file__).resolve().parents[1] / "patches"


@dataclass(frozen=True)
class Patch:
    """One file of `patches/`: a `Why:` line, then a unified diff of the release."""

    name: str
    file: str
    why: str
    text: str

    @property
    def needed_to_build(self) -> bool:
        """Patches named B... make the release compile; the others mend it."""
        return self.name.startswith("B")


def load_patches(folder: Path = PATCH_DIR) -> list[Patch]:
    """All patches, in the order in which they are applied: by name, those needed to build first."""
    patches = []
    for path in sorted(folder.glob("*.patch"), key=_place):
        text = path.read_text(encoding="utf-8")
        first, _, diff = text.partition("\n")
        if not first.startswith("Why: "):
            raise BuildError(f"patch {path.name} does not open with a line 'Why: ...'")
        patches.append(Patch(path.stem.split("-")[0], path.name, first.removeprefix("Why: ").strip(), diff))
    return patches


def _place(path: Path) -> tuple[str, int, str]:
    """Such that C10 comes after C9."""
    name = path.name.partition("-")[0]
    return name[:1], len(name), name


def parse_diff(text: str) -> list[tuple[str, list[list[str]]]]:
    """Take a unified diff apart: for each file its name and the old and new text of each hunk."""
    files: list[tuple[str, list[list[str]]]] = []
    hunk: list[str] | None = None
    for line in text.splitlines(keepends=True):
        if line.startswith(("diff --git ", "--- ", "index ", "new file mode ")):
            hunk = None
        elif line.startswith("+++ "):
            files.append((line.split(maxsplit=1)[1].strip().removeprefix("b/"), []))
        elif line.startswith("@@ "):
            hunk = ["", ""]
            files[-1][1].append(hunk)
        elif hunk is not None and line[0] in " -+\n":
            body = line[1:] if line[0] != "\n" else line
            if line[0] != "+":
                hunk[0] += body
            if line[0] != "-":
                hunk[1] += body
    return files


def apply_patch(patch: Patch, tree: Path) -> None:
    """Change the tree as the patch says, or raise: every hunk must fit in exactly one place."""
    files = parse_diff(patch.text)
    if not files:
        raise BuildError(f"patch {patch.file} holds no change")
    for name, hunks in files:
        path = tree / name
        content = path.read_text(encoding="utf-8") if path.exists() else ""
        for number, (old, new) in enumerate(hunks, 1):
            if not old and not content:
                content = new
                continue
            places = content.count(old) if old else 0
            if places != 1:
                found = "nowhere" if places == 0 else f"in {places} places"
                raise BuildError(f"patch {patch.file} does not fit: change {number} of {name} belongs {found}")
            content = content.replace(old, new)
        path.write_text(content, encoding="utf-8")

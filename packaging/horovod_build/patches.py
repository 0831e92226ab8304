"""Read and apply the patches of the release, with the new files that they add."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from horovod_build.machine import BuildError

PATCH_DIR = Path(__file__).resolve().parents[1] / "patches"
SOURCE_DIR = Path(__file__).resolve().parents[1] / "horovod_sources"


@dataclass(frozen=True)
class Patch:
    """A file of `patches/`: a line `Why: ...` and a unified diff.

    Names with B: needed to compile at all.
    """

    name: str
    file: str
    why: str
    text: str


def load_patches(folder: Path = PATCH_DIR) -> list[Patch]:
    """Read all patches in the order of application: by name, B first.

    Raises BuildError if one does not say why.
    """
    patches = []
    for path in sorted(folder.glob("*.patch"), key=_sort_key):
        text = path.read_text(encoding="utf-8")
        first, _, diff = text.partition("\n")
        if not first.startswith("Why: "):
            raise BuildError(f"patch {path.name} does not open with a line 'Why: ...'")
        patches.append(
            Patch(path.stem.split("-")[0], path.name, first.removeprefix("Why: ").strip(), diff)
        )
    return patches


def load_sources() -> dict[str, str]:
    """Read the new files that the patches need, by their paths in the release."""
    paths = [path for path in sorted(SOURCE_DIR.rglob("*")) if path.suffix in (".cc", ".h", ".py")]
    return {str(path.relative_to(SOURCE_DIR)): path.read_text(encoding="utf-8") for path in paths}


def _sort_key(path: Path) -> tuple[str, int, str]:
    """Return a key for sorting that puts C10 after C9."""
    name = path.name.partition("-")[0]
    return name[:1], len(name), name


def parse_diff(text: str) -> list[tuple[str, list[list[str]]]]:
    """Return for each file of a unified diff its name and the [old, new] texts of its hunks."""
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
    """Apply a patch to the unpacked release.

    Raises BuildError if a hunk does not fit in exactly one place, or if the diff itself makes a
    file.
    """
    files = parse_diff(patch.text)
    if not files:
        raise BuildError(f"patch {patch.file} holds no change")
    for name, hunks in files:
        path = tree / name
        content = path.read_text(encoding="utf-8") if path.exists() else ""
        for number, (old, new) in enumerate(hunks, 1):
            if not old:
                raise BuildError(
                    f"patch {patch.file} makes {name}: put new files into {SOURCE_DIR.name}/"
                )
            count = content.count(old)
            if count != 1:
                where = "nowhere" if count == 0 else f"in {count} places"
                raise BuildError(
                    f"patch {patch.file} does not fit: change {number} of {name} belongs {where}"
                )
            content = content.replace(old, new)
        path.write_text(content, encoding="utf-8")


def add_sources(sources: dict[str, str], tree: Path) -> None:
    """Write new files into the unpacked release. Raises FileExistsError if it has one of them."""
    for name, text in sources.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        with (tree / name).open("x", encoding="utf-8") as file:
            file.write(text)

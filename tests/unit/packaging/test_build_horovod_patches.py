"""Patches of Horovod fit in one place, and each says why it exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from horovod_build import patches
from horovod_build.errors import BuildError

DIFF = """Why: for the test.
--- a/one.txt
+++ b/one.txt
@@ -1,3 +1,3 @@
 first
-second
+2nd
 third
"""


def patch_of(text: str, *adds: patches.Source) -> patches.Patch:
    return patches.Patch("T1", "T1-test.patch", "for the test", text, adds)


def test_patch_changes_and_makes_files(tmp_path: Path) -> None:
    """A patch changes the lines that its diff names and makes the files that it adds."""
    (tmp_path / "one.txt").write_text("zero\nfirst\nsecond\nthird\n")
    patches.apply_patch(patch_of(DIFF.partition("\n")[2], patches.Source("folder/new.txt", "made\n")), tmp_path)
    assert (tmp_path / "one.txt").read_text() == "zero\nfirst\n2nd\nthird\n"
    assert (tmp_path / "folder" / "new.txt").read_text() == "made\n"


def test_patch_that_makes_a_file_by_itself_is_refused(tmp_path: Path) -> None:
    """A patch may not hold a whole new file, which compilers, linters and readers would not see."""
    new_file = "--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+made\n"
    with pytest.raises(BuildError, match=r"T1-test\.patch makes new\.txt: put new files into horovod_sources/"):
        patches.apply_patch(patch_of(new_file), tmp_path)


def test_patch_does_not_replace_a_file_of_the_release(tmp_path: Path) -> None:
    """A new file with the name of one in the release is refused, and the release's file stays."""
    (tmp_path / "one.txt").write_text("first\nsecond\nthird\n")
    (tmp_path / "two.txt").write_text("the release's\n")
    with pytest.raises(BuildError, match=r"T1-test\.patch adds two\.txt, which the release already has"):
        patches.apply_patch(patch_of(DIFF.partition("\n")[2], patches.Source("two.txt", "ours\n")), tmp_path)
    assert (tmp_path / "two.txt").read_text() == "the release's\n"


def test_second_line_of_a_patch_names_its_new_files(tmp_path: Path) -> None:
    """Files after `Adds:` are read from the folder of sources; the error about a missing one names the patch."""
    (tmp_path / "C1-test.patch").write_text(DIFF.replace("\n", "\nAdds: folder/a.cc b.py\n", 1))
    with pytest.raises(BuildError, match=r"C1-test\.patch adds folder/a\.cc, which is not in sources/"):
        patches.load_patches(tmp_path, tmp_path / "sources")
    (tmp_path / "sources" / "folder").mkdir(parents=True)
    (tmp_path / "sources" / "folder" / "a.cc").write_text("int a;\n")
    (tmp_path / "sources" / "b.py").write_text("b = 1\n")
    (patch,) = patches.load_patches(tmp_path, tmp_path / "sources")
    assert patch.adds == (patches.Source("folder/a.cc", "int a;\n"), patches.Source("b.py", "b = 1\n"))
    assert patch.text == DIFF.partition("\n")[2]


@pytest.mark.parametrize(
    ("content", "found"), [("nothing of it\n", "nowhere"), ("first\nsecond\nthird\n" * 2, "in 2 places")]
)
def test_patch_that_does_not_fit_names_itself(tmp_path: Path, content: str, found: str) -> None:
    """A patch that does not fit in exactly one place stops the build, with the names of patch and file."""
    (tmp_path / "one.txt").write_text(content)
    with pytest.raises(BuildError, match=rf"T1-test\.patch does not fit.*one\.txt.*{found}"):
        patches.apply_patch(patch_of(DIFF.partition("\n")[2]), tmp_path)


def test_patch_of_a_missing_file_does_not_fit(tmp_path: Path) -> None:
    """A patch of a file that the release no longer has does not fit, as one of text that it no longer has."""
    with pytest.raises(BuildError, match=r"T1-test.patch does not fit"):
        patches.apply_patch(patch_of(DIFF.partition("\n")[2]), tmp_path)


def test_every_patch_says_why() -> None:
    """The patch set of the project is readable, named, and complete."""
    found = patches.load_patches()
    assert {"B1", "C1", "C2", "C3", "C4", "C5", "C6", "L1", "L2"} <= {patch.name for patch in found}
    assert all(len(patch.why) > 20 and patches.parse_diff(patch.text) for patch in found)


def test_no_patch_makes_a_file_by_itself() -> None:
    """Every change of every patch has a place in the release, since new files are in horovod_sources/."""
    for patch in patches.load_patches():
        assert "/dev/null" not in re.findall(r"^(?:---|\+\+\+) (\S+)", patch.text, re.MULTILINE), patch.file
        assert all(old for _, hunks in patches.parse_diff(patch.text) for old, _ in hunks), patch.file


def test_every_hunk_counts_its_lines() -> None:
    """The headers of hunks have the right numbers of lines, so that `patch` and `git apply` accept them."""
    for patch in patches.load_patches():
        heads = re.findall(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", patch.text, re.MULTILINE)
        said = [[int(count or 1) for count in head] for head in heads]
        hunks = [hunk for _, of_file in patches.parse_diff(patch.text) for hunk in of_file]
        assert said == [[len(side.splitlines()) for side in hunk] for hunk in hunks], patch.file


def test_patch_without_a_reason_is_refused(tmp_path: Path) -> None:
    """A patch whose first line does not say why is refused."""
    (tmp_path / "C9-no-reason.patch").write_text("--- a/x\n")
    with pytest.raises(BuildError, match=r"C9-no-reason.patch"):
        patches.load_patches(tmp_path)


def test_patches_are_applied_by_number(tmp_path: Path) -> None:
    """The tenth patch of a letter is applied after the ninth."""
    for name in ("C10-b", "L1-c", "C9-a", "B2-d"):
        (tmp_path / f"{name}.patch").write_text("Why: a test\n")
    assert [patch.name for patch in patches.load_patches(tmp_path)] == ["B2", "C9", "C10", "L1"]


def test_without_patches_keeps_what_compiling_needs() -> None:
    """Only patches named B... are needed to build."""
    assert [p.name for p in patches.load_patches() if p.needed_to_build] == ["B1", "B2", "B3", "B4", "B5"]

"""The commands of README.md and docs/ run as printed, on two hosts."""

import re
from pathlib import Path

import pytest
from PIL import Image

from tests.support import jpegs
from tests.support.hosts import ON_HOSTS, OWN, SCRIPTS, Hosts, hosts_fixture
from tests.support.launching import DOCS, commands, output_of

pytestmark = ON_HOSTS
hosts = hosts_fixture(2, names=2, scope="module")

# Other tests run the commands of these sections and of docs/building.md.
ELSEWHERE = ("Slurm", "Containers", "Apptainer")
PROGRAMS = ("hvd-train ", "horovodrun ", "mpirun ", "torchrun ", "for size in ")
PAGES = ["../README.md", *sorted({path.name for path in DOCS.glob("*.md")} - {"building.md"})]
LINES = {
    page: [
        line
        for section, lines in commands(page).items()
        for line in lines
        if section not in ELSEWHERE and line.startswith(PROGRAMS)
    ]
    for page in PAGES
}
# The data and hosts of this test, in place of the page's.
HERE = {
    r"runs/[\w-]+": "runs/a",
    r"node\[01-04\]:8": "h[1-2]:1",
    r":4\b": ":1",
    r"\bDATA\b": "data",
    r"--np 8\b": "--np 2",
    r"--hosts hosts\b": "--hosts hostfiles/two_hosts",
}


@pytest.mark.timeout(2400)  # a page has up to 18 commands
@pytest.mark.parametrize("page", [page for page, lines in LINES.items() if lines])
def test_each_command_runs_as_printed(page: str, hosts: Hosts, tmp_path: Path) -> None:
    """In the order of the page; `runs/NAME` stands for a run that is there."""
    loop = re.findall(r"```python\n(.*?)```", (DOCS / "../README.md").read_text(), re.DOTALL)[1]
    (tmp_path / "mine.py").write_text(loop)
    (tmp_path / "bench").mkdir()
    (tmp_path / "horovodrun_scripts").symlink_to(SCRIPTS)
    (tmp_path / "hostfiles").mkdir()
    for name in ("two_hosts", "elastic"):
        (tmp_path / "hostfiles" / name).write_text("h1 slots=1\nh2 slots=1\n")
    (tmp_path / "hostfiles/localhost").write_text("localhost slots=2\n")
    jpegs.digits(tmp_path / "data", classes=range(2), most=40)
    splits = [f"DIR/{split}/{name}" for split in ("train", "val", "test") for name in "ab"]
    for folder in [*splits, "photos"]:
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (40, 40), "red").save(tmp_path / folder / "1.png")
    # By default mpirun refuses root, and more ranks than cores.
    mpirun = [
        "OMPI_ALLOW_RUN_AS_ROOT=1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        "OMPI_MCA_rmaps_base_oversubscribe=1",
    ]
    begin = hosts.inside("h1", tmp_path, *OWN, *mpirun, "bash", "-c")
    folders = (
        "--data folder --data-dir DIR --model resnet18 --image-size 32 "
        "--global-batch-size 2 --epochs 2"
    )
    output_of([*begin, f"hvd-train train {folders} --output-dir runs/a"], tmp_path)
    for line in LINES[page]:
        if "docker" not in line:
            for printed, here in HERE.items():
                line = re.sub(printed, here, line)
            output_of([*begin, line], tmp_path, limit_s=600)

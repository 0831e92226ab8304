"""Jobs of a real Slurm on two nodes; another account attacks ports and reads /proc."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.hosts import ON_SLURM, PATH, ROOT, SCRIPTS, Slurm, slurm_on_hosts
from tests.support.launching import finished, write_program
from tests.support.strangers import besieged, on, plant_key, spellings, spying, unharmed

pytestmark = ON_SLURM

# Random, as another run of these tests may be on the same machine.
KEY = uuid4().hex.encode()
CONTROL = f"everyone-may-read-this-{uuid4().hex[:8]}"
TRAINING = f"digits --epochs 3 --device cpu --ledger --output-dir {CONTROL}"
WAYS = {
    "srun": "srun -N 2 -n 2 hvd-train train",
    "train_slurm.sbatch": (
        f"sbatch --wait -N 2 --ntasks-per-node=1 {shlex.quote(str(SCRIPTS))}/train_slurm.sbatch"
    ),
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_on_hosts(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def with_known_key(slurm: Slurm, folder: Path, *command: str) -> list[str]:
    """Return a command whose job has a known key, made by Python or by `od` in the script."""
    write_program(folder / "bin", "od", f"echo {KEY.hex()}")
    path = f"{plant_key(folder / 'site', KEY)}:{ROOT}"
    return slurm.words("env", f"PYTHONPATH={path}", f"PATH={folder / 'bin'}:{PATH}", *command)


@pytest.mark.parametrize("way", WAYS)
def test_a_job_survives_attackers_on_both_nodes(way: str, slurm: Slurm) -> None:
    """Nothing runs or ends, SECURITY.md names each port, and no command line has the key."""
    slurm.folder.chmod(0o777)
    run = slurm.folder / CONTROL
    owned = slurm.folder / "owned"
    secrets = spellings("key", KEY) | spellings("written key", KEY.hex().encode())
    job = shlex.split(f"{WAYS[way]} {TRAINING}")
    command = with_known_key(slurm, slurm.folder / way, *job)
    with (
        spying({**secrets, "control": CONTROL.encode()}) as seen,
        besieged(on(slurm.hosts), owned, slurm.hosts) as ports,
    ):
        code, printed = finished(command, slurm.folder)
    printed += "".join(path.read_text() for path in slurm.folder.glob("hvd_train-*.out"))
    assert "on 2 ranks" in printed
    unharmed(way, ports, run, code, printed)
    assert printed.count("refused a request") == 1, printed
    assert len(seen.pop("control")) >= 3, "neither Slurm nor the ranks were seen"
    assert not seen
    run.rename(slurm.folder / f"run-{way}")

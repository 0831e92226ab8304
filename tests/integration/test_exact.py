"""`--reduction exact`: the same file of weights from any ranks, launchers and faults."""

import hashlib
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from hvd_train.run_files.ledger import audit
from tests.support import jpegs
from tests.support.hosts import Training
from tests.support.launching import (
    HVD_TRAIN,
    PROJECT,
    SCRIPTS,
    launch_line,
    output_of,
    ranks_of,
    started,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

EXACT = "--reduction exact --global-batch-size 24 --batch-size 3"
RESNET = (
    "train digits --model resnet18 --data synthetic --synthetic-samples 96 --synthetic-classes 4 "
    "--image-size 32 --epochs 1 --mixup 0.2 --optimizer adamw --learning-rate 0.001 --no-nesterov "
    "--clip-norm 1 --ema-decay 0.9"
)
GPT = "tokens --epochs 1 --dtype uint16 --vocabulary 1000 --width 32 --layers 1 --block 8"
GAN = "--data-dir data/train --width 4 --epochs 2"
PROGRAMS = {
    "sgd": [HVD_TRAIN, *["train", "digits", "--epochs", "2"]],
    "batch norm, mixup, AdamW, clip, average": [HVD_TRAIN, *RESNET.split()],
    "dropout": [sys.executable, f"{PROJECT}/examples/gpt.py", *GPT.split()],
    "two optimizers": [sys.executable, f"{PROJECT}/examples/dcgan.py", *GAN.split()],
}


def digest_of(folder: Path) -> str:
    """Return the digest of the final weights of a run."""
    return hashlib.sha256((folder / "model-final.pt").read_bytes()).hexdigest()


@pytest.mark.parametrize("program", PROGRAMS)
def test_any_number_of_ranks_gives_the_same_file(program: str, tmp_path: Path) -> None:
    """One, two, three and four, by Gloo and MPI, more ranks than cores."""
    jpegs.digits(tmp_path / "data", classes=range(2), most=24)
    (np.arange(4000) * 7 % 1000).astype("uint16").tofile(tmp_path / "tokens")
    digests = set()
    for launcher, ranks in (("none", 1), ("gloo", 2), ("mpi", 3), ("gloo", 4)):
        line = [*PROGRAMS[program], *f"{EXACT} --output-dir {ranks}".split()]
        output_of(launch_line(launcher, ranks, *line), tmp_path)
        digests.add(digest_of(tmp_path / str(ranks)))
    assert len(digests) == 1


def test_kills_and_a_resume_elsewhere_give_the_same_file(tmp_path: Path) -> None:
    """Workers of an elastic job are killed four times; one rank alone ends the run.

    Random steps of it are then replayed to the bit.
    """
    training = f"digits --epochs 30 --learning-rate 0.01 {EXACT} --ledger"
    training += " --commit-steps 50 --keep-checkpoints 3,every=300 --output-dir"
    local = [HVD_TRAIN, "train", *training.split()]
    output_of([*local, "alone"], tmp_path)
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    command = [f"{SCRIPTS}/train_elastic.sh", *f"--hosts hosts -- {training} run".split()]
    with started(command, tmp_path, tmp_path / "output.txt") as script:
        running = Training(tmp_path, script)
        for kills in range(4):
            running.wait_for(
                "three ranks", lambda: [w["world_size"] for w in running.worlds[-1:]] == [3]
            )
            workers = [w for w in ranks_of(script, "train") if HVD_TRAIN in w.cmdline()[:2]]
            workers[kills % 3].kill()
            running.wait_for(
                "two ranks", lambda: running.changes[-1:] and running.changes[-1]["world_size"] < 3
            )
        script.send_signal(signal.SIGTERM)
        assert script.wait(200) == 128 + signal.SIGTERM, running.output
    output_of([*local, "run"], tmp_path)
    assert audit(tmp_path / "run").faults == ()
    assert digest_of(tmp_path / "run") == digest_of(tmp_path / "alone")
    for first in random.Random(0).sample(range(360, 1790), 4):
        line = [HVD_TRAIN, *f"replay run --steps {first}:{first + 4} --top 0".split()]
        output = output_of(line, tmp_path)
        assert output.count("same bits") == 5, output

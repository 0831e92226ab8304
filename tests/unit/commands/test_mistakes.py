"""Mistakes at the command line: one line that says what to type, before anything starts."""

from pathlib import Path

import pytest

from hvd_train import cli

UNDER = {  # variables of a launcher
    "torchrun": {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
}
MISTAKES = [
    ("evaluate gone", "gone: no such run folder, checkpoint or weights"),
    ("completion", "name the shell: type `source <(hvd-train completion bash)`"),
    ("completion bsh", "unknown shell 'bsh'; did you mean 'bash'?"),
    ("predict gone.pt", "name images or folders of images: hvd-train predict RUN photo.jpg photos/"),
    ("predict gone.pt gone.jpg", "gone.jpg: no such image or folder"),
    ("predict gone.pt x.jpg --output no/c.csv", "--output no/c.csv: there is no folder no"),
    ("doctor --hosts nowhere", "cannot read the host file nowhere: No such file or directory"),
    ("sweep digits --model resnet18,resnet81", "unknown model 'resnet81'"),
    ("sweep --lr 0.1,0.2 --output-dir memory://bucket", "sweep has several runs, and memory://bucket/000-"),
    ("bench scaling --np 1_0", "--np 1_0"),
    ("bench scaling --np 1 --output-dir memory://bucket", "bench scaling has several runs, and memory://bucket is"),
    ("bench throughput --json no/found.json", "--json no/found.json"),
    ("bench input", "unknown tool of bench 'input'; known: batch, scaling, throughput"),
    ("evaluate", "which run? there is none in runs/: name a run folder"),
    ("watch", "which run? there is none in runs/: name a run folder"),
    ("report", "which run? there is none in runs/: name a run folder"),
    ("train --recipe cifar10-resnet5", "did you mean 'cifar10-resnet50'?"),
    ("train digits --recipe cifar10-resnet50", "digits and --recipe cifar10-resnet50 are two recipes: name one"),
    ("train --epochs x", "--epochs: 'x' is no whole number"),
    ("train --lr much", "--learning-rate: 'much' is no number"),
    ("train --model mine.py:model", "--model mine.py:model: name a module, not a file: mine:model"),
    ("train --model mine.py", "code of your own is written mine:function"),
    ("train --model mine.model", "unknown model 'mine.model'; code of your own is written mine:model"),
    ("train --data lib.mine.data", "code of your own is written lib.mine:data"),
    ("train --resume gone", "--resume gone: no such file; it must be auto, never, a checkpoint file, or a run folder"),
    ("train --max-time 3.0", "--max-time 3.0: write it with its units, as in 2h30m, 1.5h"),
    ("train --gpus 4", "each rank takes a GPU: `hvd-train train --np 4` starts four"),
    ("train --nodes 2", "name the hosts: `hvd-train train --hosts h1:4,h2:4`"),
    ("train --elastic", "`hvd-train launch --elastic -- train`"),
    ("train -H no-such-host.invalid:2", "unknown host no-such-host.invalid"),
    ("config --np 2", "only `hvd-train train` starts ranks"),
    ("train --model resnet18 --weights RIGHT", "known: DEFAULT, IMAGENET1K_V1\n"),
    ("train cifar10-resnet50 --epochs 1 --warmup-epochs 3", "--warmup-epochs 3 is more than --epochs 1"),
    ("train --reduction adasum", "unknown argument '--reduction'"),
    ("torchrun: train", "torchrun or another launcher started 4 processes"),
    (
        "torchrun: report",
        "type `hvd-train report` without a launcher, or `unset WORLD_SIZE` if none set it",
    ),
    (
        "mpirun: config digits",
        "runs alone: type `hvd-train config digits` without a launcher",
    ),
    ("mpirun: doctor", "type `hvd-train doctor` without a launcher"),
    # of people who come from other programs
    ("train --opt-level O2", "--opt-level is no flag of train: apex's O1 and O2 are --precision fp16"),
    ("train --amp", "type --precision fp16 or bf16"),
    ("train --fp16_allreduce", "--fp16-allreduce is no flag of train: type --compression fp16"),
    ("train /data/imagenet", "name one first: hvd-train train imagenet-resnet50 /data/imagenet"),
    ("train digits /data/imagenet", "the recipe digits reads no folder; type --data folder as well"),
]


@pytest.mark.parametrize(("line", "says"), MISTAKES)
def test_a_mistake_is_one_line(
    line: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, _, typed = line.rpartition(": ")
    for name, value in UNDER.get(launcher, {}).items():
        monkeypatch.setenv(name, value)
    assert cli.run(typed.split()) == 2
    printed = capsys.readouterr().err
    assert says in printed
    assert printed.startswith("hvd-train: ")
    assert printed.count("\n") == 1
    assert list(Path().iterdir()) == []

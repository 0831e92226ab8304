"""Mistakes at the command line: one line that says what to type, before anything starts."""

from pathlib import Path

import pytest
import torch

from tests.unit.commands.conftest import Command, typed_and_printed

UNDER = {  # variables of a launcher
    "torchrun": {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"},
    "WORLD_SIZE": {"WORLD_SIZE": "4"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
    "horovodrun --min-np": {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_ELASTIC": "1"},
}
FILES = {  # those that a line names are written first
    "flow.yaml": "epochs: [1\n",
    "text.yaml": "epochs: many\n",
    "value.yaml": "learning_rate: -1\n",
    "names.yaml": "dataset: digits\n",
    "list.yaml": "- 1\n",
    "code.yaml": "model: mine:model\n",
    "twice.yaml": "epochs: 1\nseed: 2\nepochs: 3",
    "merge.yaml": "<<: {epochs: 3}",
    "hex.yaml": "seed: !!int 0x10",
    "off.yaml": "nesterov: off",
    "true.yaml": "epochs: true",
    "clip.yaml": "clip_norm: [1]",
    "decay.yaml": "decay_epochs: 3",
    "fp8.yaml": "precision: fp8",
    # a few bytes that expand to gigabytes, and endless nesting
    "aliases.yaml": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "nested.yaml": "[" * 5_000,
    "hosts.txt": "h1 slots=x\n",
    "bad.txt": "a slots=1\nb slots=two\n",
    "option.txt": "a slots=1\n-G slots=1\n",
    "empty.txt": "# no hosts yet\n",
    "unknown.txt": "no-such-host.invalid\n",
    "notes.txt": "no checkpoint\n",
    "mistaken.py": """
import torch
from torch.utils.data import DataLoader, IterableDataset

DIGIT = torch.zeros(1, 8, 8)
network = torch.nn.Flatten()

def items(*found): return lambda: ([*found], None)

triples, strings, empty = items((DIGIT, 0, 0)), items((DIGIT, "cat")), items()
dicts, bare = items({"image": DIGIT}), items(DIGIT)
def loader(): return DataLoader([(DIGIT, 0)]), None
def stream(): return Stream(), None
def alone(): return [(DIGIT, 0)]
def text(): return "resnet18"
def rate(epochs_done): return "fast"
class Stream(IterableDataset):
    def __iter__(self): return iter([(DIGIT, 0)])
class Two(torch.nn.Module):
    def __init__(self, width, depth): super().__init__()
class Fixed(torch.nn.Module):
    def __init__(self): super().__init__()
    def forward(self, images): return images.flatten(1)
class Tuples(Fixed):
    def forward(self, images): return images, images
class Narrow(Fixed):
    def forward(self, images): return images.view(2, 9)
class Views(Fixed):
    def __init__(self): super().__init__(); self.conv = torch.nn.Conv2d(1, 2, 8, padding=4)
    def forward(self, images): return self.conv(images).view(len(images), -1)
def net(*, width): return Fixed()
""",
    "syntax_of.py": "def model(:\n",
    "failing.py": "\nnothing\n",
    "ending.py": "raise SystemExit(2)\n",
}
# Each command line has one error, which contains the line below it.
MISTAKES = """
# Commands.
$ trian
unknown command 'trian'; did you mean 'train'?
$ digits --epochs 3
name the command first: hvd-train train digits --epochs 3
$ completion
name the shell: type `source <(hvd-train completion bash)`
$ completion bsh
unknown shell 'bsh'; did you mean 'bash'?
$ predict gone.pt
name images or folders of images: hvd-train predict RUN photo.jpg photos/
$ predict gone.pt gone.jpg
gone.jpg: no such image or folder
$ evaluate gone
gone: no such run folder, checkpoint or weights
$ evaluate
which run? there is none in runs/: name a run folder
$ evaluate notes.txt
notes.txt is not a checkpoint of hvd_train
$ evaluate --device gpu
--device: invalid choice: 'gpu' (choose from
$ export gone
gone: no such run folder, checkpoint or weights
$ watch gone
gone: no such run folder
$ watch a b
unexpected 'b': leave it out
$ why
which run? none in runs/ trains on this host: name a run folder
$ why gone
gone: no such run folder
$ audit --run gone
unknown argument '--run'; known: --help, -h
$ audit gone
gone has no ledger.jsonl: train with --ledger to have one
$ doctor --hosts nowhere
cannot read the host file nowhere: No such file or directory
$ doctor --hosts hosts.txt
hosts.txt, line 1: 'h1 slots=x' is not of the form 'NAME slots=N'
$ doctor -H h1:x
'h1:x' is not of the form 'NAME slots=N'
$ prove
name the script: hvd-train prove python mine.py
$ prove absent_program
there is no absent_program
$ sweep digits --model resnet18,resnet81
unknown model 'resnet81'
$ sweep --lr 0.1,x
--learning-rate is 'x'; it must be a number
$ sweep --lr 0.1,0.2 --output-dir memory://bucket
sweep has several runs, and memory://bucket/000-
$ sweep --lr 0.1,0.2 --output-dir notes.txt
--output-dir notes.txt is a file: name a folder
$ bench input
unknown command 'input'; known: scaling, throughput
$ bench digits
name the command first: hvd-train bench throughput digits
$ bench throughput --json no/found.json
--json no/found.json
$ bench scaling
write numbers of workers from 1 on, as in --np 1,2,4
$ bench scaling --np 1_0
--np '1_0': write numbers of workers
$ write-shards
the following arguments are required: DATA, OUT
$ write-shards nowhere out
nowhere: no such folder: name one with train/ and val/
$ write-shards hf:nowhere out
there is no such folder: save a DatasetDict by save_to_disk
$ write-shards mistaken:alone out
write a function that returns (training set,
$ write-shards mistaken:empty out
the training set of --data mistaken:empty is empty
$ write-shards mistaken:dicts s3://bucket/set
s3://bucket/set: name a folder, and copy it
$ write-shards mistaken:dicts notes.txt
notes.txt: Not a directory
$ write-shards mistaken:dicts /proc/none/out
/proc/none: No such file or directory
$ write-shards mistaken:dicts out --shard-size big
size 'big': write it as in 500GB
$ write-shards mistaken:dicts out --format mds --shard-size 5GB
--shard-size is 5,000,000,000: the most for mds is 4,294,967,295
$ index nowhere
nowhere: cannot list it (FileNotFoundError:
$ index none://bucket
none://bucket: cannot open it (ValueError: Protocol not known: none
# Config files.
$ train --config nowhere.yaml
cannot read nowhere.yaml: No such file or directory
$ train digits --config text.yaml
is a whole run already; leave out the recipe 'digits'
$ config --config flow.yaml
flow.yaml is not a YAML file: line 2: expected ',' or ']'
$ config --config text.yaml
text.yaml: --epochs is 'many'; it must be a whole number
$ config --config value.yaml
value.yaml: --learning-rate is -1; it must be a number above 0
$ config --config names.yaml
names.yaml: unknown setting 'dataset'; did you mean 'data'?
$ config --config list.yaml
list.yaml must hold settings as `name: value`, not [1]
$ config --config twice.yaml
twice.yaml is not a YAML file: epochs is given twice
$ config --config merge.yaml
merge.yaml: unknown setting '<<'
$ config --config hex.yaml
hex.yaml: --seed is '0x10'; it must be a whole number
$ config --config off.yaml
off.yaml: --nesterov is 'off'; it must be true or false
$ config --config true.yaml
true.yaml: --epochs is True; it must be a whole number
$ config --config clip.yaml
clip.yaml: --clip-norm is [1]; it must be a number or none
$ config --config decay.yaml
decay.yaml: --decay-epochs is 3; it must be a list
$ config --config fp8.yaml
fp8.yaml: --precision is 'fp8'; it must be one of auto, fp32, fp16, bf16
$ config --config aliases.yaml
aliases.yaml is not a YAML file: aliases are refused
$ config --config nested.yaml
nested.yaml is not a YAML file: it nests too deep
$ config --config code.yaml
if you trust who wrote it, add --trust
# Recipes, and flags of this and of other programs.
$ train digitz
unknown recipe 'digitz'; did you mean 'digits'
$ train --recipe=
unknown recipe ''; known: cifar10-resnet18-transfer
$ train digits --recipe cifar10-resnet50
digits and --recipe cifar10-resnet50 are two recipes: name one
$ train gpt --data-dir nowhere
cannot read the tokens in nowhere/train.bin:
$ train --epoch 5
unknown argument '--epoch'; did you mean '--epochs'?
$ train --epochs
--epochs: expected one argument
$ train --compile yes
unexpected 'yes': leave it out (a switch, such as --compile, takes no value)
$ train digits images more
unexpected 'more': leave it out
$ train digits a --data folder --data-dir b
a and --data-dir b are two folders: name one
$ train --workers-per-node 8
type --workers for the loader processes of each rank
$ train --gpus 4
each rank takes a GPU: `hvd-train train --np 4` starts four
$ train --elastic
`hvd-train launch --elastic -- train`
$ train -H no-such-host.invalid:2
unknown host no-such-host.invalid
$ config --np 2
only `hvd-train train` starts ranks
# Wrong types and ranges.
$ train --epochs x
--epochs is 'x'; it must be a whole number
$ train --epochs 0
--epochs is 0; it must be at least 1
$ train --lr nan
--learning-rate is nan; it must be a number above 0
$ train --decay-epochs 30,60
--decay-epochs is '30,60'; it must be a number
$ train --precision amp
--precision is 'amp'; it must be one of auto, fp32, fp16, bf16
$ train --seed -1
--seed is -1; it must be at least 0 and below 2**63
$ train --max-time 3.0
--max-time 3.0: write it with its units, as in 2h30m, 1.5h
$ train --max-time ''
--max-time : write it with its units
$ train --max-time 2
--max-time 2: write it with its units
$ train --max-time 30m2h
--max-time 30m2h: write it with its units
$ train --max-time .h
--max-time .h: write it with its units
$ train --max-time=-1h
--max-time -1h: write it with its units
$ train --keep-checkpoints ''
--keep-checkpoints : type a number from 1 on, as in 3 or 3,every=1000
$ train --keep-checkpoints 0
--keep-checkpoints 0: type a number from 1 on, as in 3 or 3,every=1000
$ train --keep-checkpoints many
--keep-checkpoints many: type a number from 1 on, as in 3 or 3,every=1000
$ train --keep-checkpoints 3,
--keep-checkpoints 3,: type a number from 1 on, as in 3 or 3,every=1000
$ train --keep-checkpoints every=5
--keep-checkpoints every=5: type a number from 1 on, as in 3 or 3,every=1000
$ train --keep-checkpoints 3,every=0
--keep-checkpoints 3,every=0: type a number from 1 on, as in 3 or 3,every=1000
$ train --keep-checkpoints 0,every=5
--keep-checkpoints 0,every=5: type a number from 1 on, as in 3 or 3,every=1000
$ train --keep-checkpoints=-1
--keep-checkpoints -1: type a number from 1 on, as in 3 or 3,every=1000
$ train --profile ''
--profile : write steps as in 20 or 20:25; the first step is 1
$ train --profile 0:3
--profile 0:3: write steps as in 20 or 20:25; the first step is 1
$ train --profile 5:4
--profile 5:4: write steps as in 20 or 20:25; the first step is 1
$ train --profile ²
--profile ²: write steps as in 20 or 20:25; the first step is 1
$ train --profile 1:
--profile 1:: write steps as in 20 or 20:25; the first step is 1
$ train --global-batch-size none
no batch size: give --batch-size (per worker) or --global-batch-size
$ train --profile 5-10
--profile 5-10: write steps as in 20 or 20:25
$ train --target 0.9
--target 0.9: type NAME=VALUE
$ train --target acc=0.9
--target acc: it must be top1 or loss for this task
$ train --best-by accuracy
--best-by accuracy: it must be top1 or loss
$ train --unfreeze layer4
write it as EPOCH:PATTERN, as in --unfreeze 5:layer4.* 10:*
$ train --optimizer-args eps
--optimizer-args eps: type NAME=VALUE, as in eps=1e-6
# Unknown names.
$ train --optimizer AdamW
unknown optimizer 'AdamW'; did you mean 'adamw'?
$ train --optimizer torch.optim.RAdam
code of your own is written torch.optim:RAdam
$ train --no-nesterov --optimizer torch.optim:LBFGS
evaluates the loss several times
$ train --no-nesterov --optimizer torch:zeros
is no class of torch.optim.Optimizer
$ train --no-nesterov --optimizer adam --optimizer-args beta=1
unexpected keyword argument 'beta'
$ train --no-nesterov --optimizer adam --optimizer-args eps=-1
Invalid epsilon value
$ train --schedule cosin
unknown schedule 'cosin'; did you mean 'cosine'?
$ train --log-to wandbb
unknown value of --log-to 'wandbb'; did you mean 'wandb'?
$ train --log-to none,wandb
unknown value of --log-to 'none'; known: mlflow, tensorboard, wandb
$ train --task regression
the model returns [2, 10] for targets of [2]; it must return their shape
$ train --task detection
unknown task 'detection'; did you mean 'segmentation'?
$ train --model ResNet18
unknown model 'ResNet18'; did you mean 'resnet18'?
$ train --model timm:resnet999
unknown model of timm 'resnet999'
$ train --model resnet18 --weights RIGHT
known: DEFAULT, IMAGENET1K_V1
$ train --freeze layer9
no parameter of the model is called layer9; they are called 0.weight
$ train --freeze *
--freeze * freezes every parameter
$ train --data cifar
unknown data set 'cifar'; did you mean 'cifar10'
$ train --data data/images
for images in a folder type --data folder --data-dir data/images
# Files, folders and URLs.
$ train --data folder
--data folder needs --data-dir: the folder that holds train/ and val/
$ train --data folder --data-dir nowhere
nowhere/train is missing or empty
$ train --data cifar10 --data-dir nowhere
add --download or name its --data-dir
$ train --data hf:nowhere
there is no such folder: save a DatasetDict by save_to_disk
$ train --data-dir images
--data digits reads no --data-dir: add --data folder
$ train --weights nowhere.pt
--weights nowhere.pt: no such file
$ train --resume gone
--resume gone: no such file; it must be auto, never, a checkpoint file, or a run folder
$ train --output-dir /proc/none
choose another with --output-dir
$ train --output-dir none://bucket/run
--copy-to none://bucket/run: Protocol not known: none
$ train --copy-to s3://bucket/run
name a folder of this machine, too: --output-dir FOLDER
$ train --output-dir s3://bucket/../run
type a folder, or a URL
$ train --output-dir s3://bucket/run --copy-to s3://bucket/b
type a folder, or a URL
# Settings that exclude one another.
$ train cifar10-resnet50 --epochs 1 --warmup-epochs 3
--warmup-epochs 3 is more than --epochs 1
$ train --batch-size 16 --global-batch-size 50 --accumulation-steps 4
must be a multiple of 64
$ train --on-resize per-worker
--on-resize per-worker needs --batch-size
$ train --on-resize per-worker -b 16
changes the global batch: add --lr-scaling linear or sqrt
$ train --optimizer adam --nesterov
--nesterov needs --optimizer sgd or lars
$ train --random-erasing 0.5
--random-erasing do not go with --data digits
$ train --model vit_b_16
model vit_b_16 cannot take the first two samples: Wrong image height
$ train --model digits-convnet --weights DEFAULT
torchvision has weights for its own models only
$ train --device cuda
type --device cpu
# Code of the user: its name, what it takes and returns, and its items.
$ train --model mine.py
code of your own is written mine:function
$ train --model mine.py:model
--model mine.py:model: name a module, not a file: mine:model
$ train --model mine.model
unknown model 'mine.model'; code of your own is written mine:model
$ train --data lib.mine.data
code of your own is written lib.mine:data
$ train --model no_module:model
cannot import no_module: No module named 'no_module'
$ train --model syntax_of:model
cannot import syntax_of: invalid syntax (syntax_of.py, line 1)
$ train --model failing:f
failing.py, line 2, in <module>)
$ train --model ending:f
cannot import ending: it calls sys.exit(2) (
$ train --model ./lib/mine:f
name a module, not a file: mine:f, with PYTHONPATH=./lib
$ train --model mistaken:net
net must accept num_classes: write `def net(num_classes)`
$ train --model mistaken:txt
unknown function in mistaken for --model 'txt'; did you mean 'text'?
$ train --model mistaken:Two
Two must accept num_classes: write `def __init__(self, num_classes)`
$ train --model mistaken:network
is a model already: write a function that returns it
$ train --model mistaken:text
it returned str, not a torch.nn.Module
$ train --model mistaken:Tuples
returns tuple; it must return logits of shape [batch, num_classes = 10]
$ train --model mistaken:Fixed
it must return logits of shape [batch, num_classes = 10]
$ train --model mistaken:Narrow
mistaken.py, line 27, in forward)
$ train --model mistaken:Views --channels-last on
or type --channels-last off
$ train --model mistaken:Narrow --task regression
cannot take the first two samples: shape
$ train --schedule mistaken:rate
--schedule mistaken:rate: 'fast' after 1 epochs is not a number from 0 on
$ train --data mistaken:alone
write a function that returns (training set, validation set or None)
$ train --data mistaken:loader
not a DataLoader
$ train --data mistaken:stream
another map-style data set, with __len__ and __getitem__
$ train --data mistaken:empty
the training set of --data mistaken:empty is empty
$ train --data mistaken:triples
return (image tensor, integer class number from 0 on, below
$ train --data mistaken:dicts
return (image tensor, integer class number from 0 on, below
$ train --data mistaken:bare
return (image tensor, integer class number from 0 on, below
$ train --data mistaken:strings
return (image tensor, integer class number from 0 on, below
# Launchers.
$ torchrun: report
torchrun started 4 processes, and this command runs alone
$ WORLD_SIZE: bench throughput
type `hvd-train launch --np 4 -- hvd-train bench throughput`
$ horovodrun --min-np: train digits
type `hvd-train launch --elastic`
$ WORLD_SIZE: report
type `hvd-train report`, or `unset WORLD_SIZE` if no launcher set it
$ mpirun: doctor
type `hvd-train doctor` without a launcher
# Ways to start ranks.
$ launch -n 0
-n/-np/--np: 0: it must be a whole number from 1 on
$ launch --bogus -- digits
unrecognized arguments: --bogus
$ launch -- digit
unknown command 'digit'; did you mean 'digits'?
$ launch -- digits --np 2
--np and --hosts are for launch: type them before `--`
$ launch -- digits --epoch 2
did you mean '--epochs'?
$ launch --hosts empty.txt
empty.txt: name hosts, one on each line
$ launch --with mpirun --hosts option.txt
option.txt, line 2: '-G slots=1' is not of the form 'NAME slots=N'
$ launch --hosts a:2,b:2 --np 5
--np 5: a:2,b:2 has 4 slots
$ launch --hosts no-such-host.invalid:2
unknown host no-such-host.invalid: fix the name
$ launch --elastic --hosts unknown.txt
unknown host no-such-host.invalid
$ launch --elastic --hosts nowhere
nowhere is no file
$ launch --elastic --hosts a:2
--elastic reads a host file while the job runs, and a:2 is no file
$ launch --elastic --hosts bad.txt
bad.txt, line 2: 'b slots=two'
$ launch --elastic --discover false
false: exit code 1
$ launch --elastic --with slurm
there is no Slurm allocation here
$ launch --with docker --mpi --hosts a:2
--mpi: not allowed with argument --with
$ launch --elastic --mpi
--elastic does not go with --with mpi
$ launch --elastic --min-np 4 --max-np 2
--max-np 2 is less than --min-np 4
$ launch --min-np 2 -- digits
--min-np, --max-np and --discover are for --elastic
$ launch --with slurm --hosts a:2
--hosts does not go with --with slurm
$ launch --with slurm
there is no Slurm allocation here: type salloc or sbatch
$ launch --with docker
--with docker needs --hosts FILE
$ launch --env A=hunter2 -- digits
--env takes the name of a variable, whose value is in the environment
# of people who come from other programs
$ train --opt-level O2
--opt-level is no flag of train: apex's O1 and O2 are --precision fp16
$ train --fp16_allreduce
--fp16-allreduce is no flag of train: type --compression fp16
$ train /data/imagenet
name one first: hvd-train train imagenet-resnet50 /data/imagenet
$ train digits /data/imagenet
the recipe digits reads no folder; type --data folder as well
$ mpirun: bench scaling --np 1,2
runs alone: type `hvd-train bench scaling --np 1,2` without a launcher
"""


CASES = typed_and_printed(MISTAKES)


@pytest.mark.parametrize("line", CASES)
def test_a_mistake_is_one_line(
    line: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line may begin with its launcher."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    launcher, _, typed = line.rpartition(": ")
    for name, value in UNDER.get(launcher, {}).items():
        monkeypatch.setenv(name, value)
    written = {name for name in FILES if name in line or f"{Path(name).stem}:" in line}
    for name in written:
        Path(name).write_text(FILES[name])
    printed = command(typed, 2).err
    assert CASES[line] in printed
    assert printed.startswith("hvd-train: ")
    assert printed.count("\n") == 1
    assert "hunter2" not in printed
    assert {str(path) for path in Path().iterdir()} - {"__pycache__"} == written

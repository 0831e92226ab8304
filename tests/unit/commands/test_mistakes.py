"""What newcomers type: each line works, or is answered with one line that says what to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train import cli, recipes
from hvd_train.commands.train import parse_train

REFUSED = [
    # what is typed, what the one line says
    ("train cifar10-resnet50 --recipe digits", "'cifar10-resnet50' and --recipe digits both name the recipe"),
    ("train --recipe digits --recipe cifar10-resnet50", "both name the recipe; leave out one of them"),
    ("train --recipe digit", "unknown recipe 'digit'; did you mean 'digits'?"),
    ("train --recipe", "--recipe needs the name of a recipe"),
    ("train --np 0", "--np 0: it must be a whole number from 1 on\n"),
    ("train digits -np=many", "--np many: it must be a whole number from 1 on\n"),
    ("train --np", "--np needs a number\n"),
    ("train --np 2 --epochs ten", "--epochs: it must be a whole number, not 'ten'\n"),
    (
        "train --np 2 --world-size 2",
        "--world-size: ranks are started by `hvd-train train --np 2 ...`, on several hosts",
    ),
    ("train --hosts h1,h2", "cannot read the host file h1,h2: No such file or directory\n"),
    ("train --np 3 --hosts two", "--np 3: two has slots for 2; leave out --np to start a rank for each of them\n"),
    ("train --hosts two --np 2", "h1.invalid does not let us in by ssh without a password (ssh: Could not resolve"),
    ("train --np 2 --controller nccl", "--controller nccl: it must be gloo or mpi\n"),
    ("train --controller mpi", "--controller says how ranks find one another: add --np N or --hosts FILE, which start"),
    ("train --gpus 8", "`hvd-train train --np 8 ...`, on several hosts with --hosts FILE; --gpu-ids 0,1 chooses among"),
    ("train --gpus", "--gpus needs a number"),
    (
        "train -H h1:2,h2:2",
        "-H: ranks are started by `hvd-train train --np 4 ...`, on several hosts with --hosts FILE\n",
    ),
    ("train --nodes 2", "--nodes: ranks are started by `hvd-train train --np 4 ...`"),
    ("bench throughput --np 3", "type `horovodrun -np 3 hvd-train bench throughput ...`, on several hosts with -H "),
    ("bench scaling --gpus 4", "type `hvd-train bench scaling --np 4 ...`, on several hosts with --hosts FILE; --gpu-"),
    ("bench scaling --gpus 1,2", "type `hvd-train bench scaling --np 1,2,4 ...`, on several hosts with --hosts FILE"),
    ("tune digits --gpus 4", "--gpus: tune starts its ranks itself; type `hvd-train tune --np 4 ...`, on several"),
    ("tune --hostfile h", "type `hvd-train tune --np 4 ...`, on several hosts with --hosts FILE\n"),
    ("show-data --world-size 3", "--world-size: show-data starts no ranks; type `hvd-train show-data --ranks 3 ...`\n"),
    ("config --gpus 4", "--gpus: config starts no ranks; leave it out\n"),
    ("sweep --np 4", "type `mpirun -np 4 hvd-train sweep ...`, on several hosts with -H host1:4,host2:4\n"),
    ("train --epochs 3 digits", "'digits' names a recipe, which comes first: `hvd-train train digits ...`\n"),
    ("config --seed 3 digits", "'digits' names a recipe, which comes first: `hvd-train config digits ...`\n"),
    (
        "train --epochs 3 --warmup-epochs 3.5",
        "3.5 is longer than the whole run (--epochs 3); type --warmup-epochs 3 or less, or more --epochs\n",
    ),
    ("train --model mine.py:net", "--model mine.py:net: write MODULE:FUNCTION, as in --model mine:net\n"),
    ("train --model ./nets/small.py", "write MODULE:FUNCTION, as in --model nets.small:model\n"),
    ("train --model mine.net", "write MODULE:FUNCTION, as in --model mine:net\n"),
    ("train --model mine", "write MODULE:FUNCTION, as in --model mine:model\n"),
    ("train --data mine.py:data", "write MODULE:FUNCTION, as in --data mine:data\n"),
    ("train --data mine.sets", "write MODULE:FUNCTION, as in --data mine:sets\n"),
    ("train --epochs ten", "--epochs: it must be a whole number, not 'ten'\n"),
    ("train --workers 1.5", "--workers: it must be a whole number, not '1.5'\n"),
    ("train --gpu-ids 0 a", "--gpu-ids: it must be a whole number, not 'a'\n"),
    ("train --lr 1,5", "--learning-rate: it must be a number, not '1,5'\n"),
    ("train --precision fp8", "--precision: it must be one of fp32, fp16, bf16, not 'fp8'\n"),
    ("train --lr", "--learning-rate needs a value\n"),
    ("watch", "there is no run in runs/: name a run folder\n"),
    ("completion", "hvd-train completion needs an argument: `hvd-train completion --help` says which\n"),
    ("train --nesterov true", "unknown argument 'true'; it belongs to no flag: `hvd-train train --help` lists them\n"),
    (
        "train --model resnet18 --weights IMAGENET1K_V7",
        "unknown weights of resnet18 'IMAGENET1K_V7'; did you mean 'IMAGENET1K_V1'?",
    ),
    ("train --model resnet18 --weights best", "known: DEFAULT, IMAGENET1K_V1\n"),
    ("train cifar10-resnet50 --epochs 1 --warmup-epochs 5", "--warmup-epochs 5 is longer than the whole run"),
    ("train digits --epochs 1 --repeated-augmentation 4", "--epochs 1 is not a multiple of --repeated-augmentation 4"),
    ("train digits --optimizer adam --nesterov", "--nesterov needs --optimizer sgd or lars"),
    ("train --model nobody.net", "unknown model 'nobody.net'"),
    # what other programs call it
    ("train --checkpoint last.pt", "--checkpoint: checkpoints are kept in the run folder, --output-dir, and the same"),
    ("train --opt-level O2", "--opt-level: mixed precision is --precision fp16 or bf16; the weights stay in fp32"),
    ("train --amp", "--amp: mixed precision is --precision fp16 or bf16"),
    ("train --fp16-allreduce", "--fp16-allreduce: gradients travel in fp16 with --compression fp16\n"),
    ("train --use-adasum", "--use-adasum: Adasum is --reduction adasum\n"),
    ("train --batches-per-allreduce 4", "--batches-per-allreduce is called --accumulation-steps here\n"),
    ("train --base-lr 0.0125", "the learning rate follows the global batch with --lr-scaling linear"),
    ("train --train-dir a --val-dir b", "--train-dir: the data are in one folder: --data folder --data-dir DIR"),
    ("train --print-freq 10", "--print-freq is called --log-steps here\n"),
    ("train --pretrained", "--pretrained: the newest weights of torchvision's model are --weights DEFAULT\n"),
    ("train -e", "-e: a run is evaluated by `hvd-train evaluate RUN`\n"),
    ("train --start-epoch 5", "and the same command goes on from the newest one"),
    ("train --max_epochs 3", "--max-epochs is called --epochs here\n"),
    ("train --accumulate_grad_batches=4", "--accumulate-grad-batches is called --accumulation-steps here\n"),
    ("train --devices 2", "--devices: ranks are started by `hvd-train train --np N`"),
    ("train --strategy ddp", "--strategy: ranks train by Horovod"),
    ("train --accelerator gpu", "--accelerator is called --device here\n"),
    ("train --mixed_precision fp16", "--mixed-precision: mixed precision is --precision fp16 or bf16"),
    ("train --num_processes 2", "--num-processes: ranks are started by `hvd-train train --np N`"),
    ("train --limit-val-batches 3", "--limit-val-batches: --trial takes a few steps"),
    ("train --ckpt-path x.ckpt", "--resume FILE starts a new run from a file\n"),
    ("train --gradient_clip_val 1", "--gradient-clip-val is called --clip-norm here\n"),
    ("train --no-cuda", "--no-cuda: a CPU is chosen by --device cpu\n"),
    ("train --sync-bn", "--sync-bn is called --sync-batch-norm here\n"),
    ("train --logdir tb", "TensorBoard's files are in the run folder: `tensorboard --logdir runs`"),
    ("train --seed_everything 1", "--seed-everything is called --seed here\n"),
    ("train --wd 1e-4", "--wd is called --weight-decay here\n"),
    ("train --num-workers 4", "--num-workers is called --workers here\n"),
    ("train --workers-per-node 4", "unknown argument '--workers-per-node'; did you mean '--workers-per-host'?"),
    ("train --local_rank 0", "--local-rank: ranks are started by"),
    ("train --dist-url env://", "--dist-url: ranks are started by"),
    ("train -n 2 --nproc 2", "ranks are started by"),
    # folders and files in the place of other things
    ("train pictures", "'pictures' is a folder, and no recipe: for images in train/ and val/"),
    ("train digits pictures", "'pictures' is a folder; the one with the data is named by --data-dir pictures\n"),
    ("train --data folder", "--data folder needs --data-dir: the folder that holds train/ and val/\n"),
    ("train --data folder --data-dir gone", "gone"),
    ("train --data folder --data-dir pictures", "pictures"),
    ("train --config gone.yaml", "gone.yaml"),
    ("train --config two", "two"),
    ("train --resume gone", "--resume gone: no such file"),
    ("train --output-dir two", "two"),
    ("train --tuned gone.json", "gone.json"),
    ("evaluate gone", "gone: no such run folder, checkpoint or file of weights\n"),
    ("evaluate", "there is no run in runs/"),
    ("evaluate two", "two"),
    ("predict gone picture.jpg", "picture.jpg: no such image or folder\n"),
    ("export gone", "gone"),
    ("audit gone", "gone: no such run folder\n"),
    ("report gone", "gone"),
    ("watch gone", "gone"),
    # values that cannot be, alone or together
    ("train --batch-size 0", "--batch-size is 0; it must be at least 1\n"),
    ("train --epochs 0", "--epochs is 0; it must be at least 1\n"),
    ("train --lr 0", "--learning-rate is 0; it must be a number above 0\n"),
    ("train --lr nan", "--learning-rate is nan; it must be a number above 0\n"),
    ("train --momentum 1.5", "--momentum is 1.5; it must be at least 0 and below 1\n"),
    ("train --label-smoothing 1", "--label-smoothing is 1; it must be at least 0 and below 1\n"),
    ("train --seed -1", "--seed is -1; it must be at least 0"),
    ("train --max-steps 0", "--max-steps is 0; it must be at least 1\n"),
    (
        "train --max-time forever",
        "--max-time forever: write it as in 2h30m, 1.5h, 90m or 45s; a number alone is seconds\n",
    ),
    ("train --total-time 2hours", "--total-time 2hours: write it as in 2h30m, 1.5h, 90m or 45s"),
    ("train --profile 5-10", "--profile 5-10: write steps as in 20 or 20:25; the first step is 1\n"),
    ("train --profile 1:1000", "at most 50 steps, since a trace is large\n"),
    ("train --gpu-ids 0,0", "--gpu-ids names a GPU twice: each rank has one of its own\n"),
    ("train --target top1", "--target top1: write a figure and its value, as in --target miou=0.7\n"),
    ("train --target miou=0.5", "--target miou=0.5"),
    ("train --target top1=0.9 --target-accuracy 0.9", "are two aims: leave one out\n"),
    ("train --target-accuracy 75", "--target-accuracy is 75; it must be at least 0 and at most 1\n"),
    ("train --decay-epochs 60 30", "--decay-epochs must rise, as in --decay-epochs 30 60 80\n"),
    ("train --min-learning-rate 1", "--min-learning-rate 1 is above --learning-rate"),
    ("train --optimizer adamm", "unknown optimizer 'adamm'; did you mean 'adam'?\n"),
    ("train --no-nesterov --optimizer torch.optim:Nothing", "unknown function in torch.optim for --optimizer"),
    ("train --optimizer-args eps", "it must be name=value, as in --optimizer-args eps=1e-6 betas=[0.9,0.95]\n"),
    ("train --schedule cosin", "unknown schedule 'cosin'; did you mean 'cosine'?\n"),
    ("train --task detection", "unknown task 'detection'"),
    ("train --data imagenet", "--data imagenet: images in folders are --data folder --data-dir DIR, as in the recipe"),
    ("train --model resnet5", "unknown model 'resnet5'; did you mean 'resnet50'?\n"),
    ("train --decode gpu", "--decode gpu goes with --data folder, webdataset or hf, not with digits: leave it out\n"),
    ("train --cache disk", "--cache disk goes with --data folder, not with digits: leave it out\n"),
    ("train --download", "--download does not go with --data digits: it works for cifar10 and cifar100\n"),
    ("train --reduction adasum --clip-norm 1", "--clip-norm does not go with --reduction adasum"),
    ("train --freeze nothing.*", "--freeze nothing.*: no parameter of the model is called nothing.*; they are"),
    ("train --unfreeze layer4", "--unfreeze"),
    ("train --compression int8", "--compression: it must be one of auto, none, fp16, bf16, not"),
    ("train --precision 16-mixed", "--precision: it must be one of fp32, fp16, bf16, not '16-mixed'\n"),
    ("train --device tpu", "--device: it must be one of auto, cpu, cuda, not 'tpu'\n"),
    ("train --device cuda", "--device cuda"),
    ("train --progress none", "--progress"),
    ("train --global-batch-size 10 --batch-size 4 --accumulation-steps 3", "is not a multiple of --batch-size 4"),
    ("train --on-resize per-worker", "--on-resize per-worker"),
    ("train --global-batch-size 99999", "99999"),
    # commands
    ("trian", "unknown command 'trian'; did you mean 'train'?\n"),
    ("bench speed", "speed"),
    ("bench batch --from 64 --to 32", "--from 64 is larger than --to 32\n"),
    ("bench batch --np 2", "type `horovodrun -np 2 hvd-train bench batch ...`, on several hosts with -H "),
    ("bench batch --plot speed.pdf", "--plot speed.pdf: it must end in .png or .svg\n"),
    ("bench batch --plot gone/speed.png", "--plot gone/speed.png: there is no folder gone; make it first\n"),
    ("bench batch --plot mine.py", "--plot mine.py: it must end in .png or .svg\n"),
    ("bench batch --peak-tflops", "--peak-tflops needs a number\n"),
    ("bench throughput --peak-tflops 0", "--peak-tflops 0: it must be a number above 0, as in --peak-tflops 312\n"),
    ("bench throughput --peak-tflops nan", "--peak-tflops nan: it must be a number above 0"),
    ("bench batch digit", "unknown recipe 'digit'; did you mean 'digits'?"),
    ("bench scaling", "bench scaling needs numbers of workers: --np 1,2,4\n"),
    ("bench scaling --np 1,1", "--np 1,1 names a number of workers twice\n"),
    ("bench scaling --np 1 --mode hard", "--mode hard: it must be weak or strong\n"),
    ("sweep digits --trials 0", "--trials"),
    ("completion fish", "it must be one of bash, zsh, not 'fish'\n"),
    ("doctor --hosts gone", "gone"),
    ("show-data --ranks 0", "--ranks"),
]


@pytest.mark.parametrize(("typed", "told"), REFUSED)
def test_a_mistake_is_answered_with_what_to_type(typed: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line on stderr, with exit code 2 and without a traceback."""
    Path("mine.py").write_text("def net(num_classes): ...\n")
    Path("two").write_text("localhost\nh1.invalid\n")
    Path("pictures").mkdir()
    assert cli.run(typed.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


@pytest.mark.parametrize("typed", ["--recipe cifar10-resnet50 --seed 1", "--seed 1 --recipe=cifar10-resnet50"])
def test_the_flag_of_the_recipe_selects_it(typed: str) -> None:
    """It does not only name the run folder."""
    assert parse_train(typed.split()) == recipes.get("cifar10-resnet50").replace(seed=1)


def test_a_file_beside_it_takes_no_name_away() -> None:
    """A digits.py in the current folder does not make the data set of this name a mistake."""
    for name in ("digits", "resnet18"):
        Path(f"{name}.py").touch()
    assert cli.run(["config", "--data", "digits", "--model", "resnet18"]) == 0


@pytest.mark.parametrize("none", ["none", "None", "NONE"])
def test_none_is_understood_in_any_case(none: str) -> None:
    """By every setting that may have no value, and by those that know the word."""
    flags = ("--weights", "--workers", "--gpu-ids", "--output-dir", "--max-time", "--compression", "--freeze")
    made = parse_train([word for flag in flags for word in (flag, none)]).settings()
    assert [made[name] for name in ("weights", "workers", "gpu_ids", "output_dir", "max_time")] == [None] * 5
    assert made["compression"] == made["freeze"] == "none"


@pytest.mark.parametrize("command", ["train", "sweep", "bench throughput", "evaluate gone"])
def test_copies_by_torchrun_are_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would train side by side, each in a folder of its own."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["hvd-train", *command.split()])
    assert cli.run(command.split()) == 2
    assert f"type `horovodrun -np 2 hvd-train {command}`" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("typed", "changes", "notes"),
    [
        (
            "imagenet-resnet50-modern --epochs 6 --warmup-epochs 0",
            {"epochs": 6, "warmup_epochs": 0.0, "repeated_augmentation": 2},
            ["--repeated-augmentation 2 instead of the recipe's 4, which does not go with --epochs 6"],
        ),
        (
            "imagenet-resnet50-modern --epochs 3",
            {"epochs": 3, "warmup_epochs": 5 * 3 / 600, "repeated_augmentation": 1},
            [
                "--warmup-epochs 0.025 instead of the recipe's 5, which does not go with --epochs 3",
                "--repeated-augmentation 1 instead of the recipe's 4, which does not go with --epochs 3",
            ],
        ),
        ("imagenet-resnet50 --epochs 5", {"epochs": 5}, []),
        (
            "digits --optimizer adam",
            {"optimizer": "adam", "nesterov": False},
            ["--no-nesterov instead of the recipe's --nesterov, which does not go with --optimizer adam"],
        ),
        ("digits --optimizer adamw --no-nesterov", {"optimizer": "adamw", "nesterov": False}, []),
        (
            "cifar10-resnet18-transfer --global-batch-size 100",
            {"global_batch_size": 100, "accumulation_steps": 1},
            ["--accumulation-steps 1 instead of the recipe's 4, which does not go with --global-batch-size 100"],
        ),
        ("cifar10-resnet18-transfer --global-batch-size 256", {"global_batch_size": 256}, []),
        (
            "cifar10-resnet18-transfer --model mine:net",
            {"model": "mine:net", "weights": None, "freeze": "none"},
            [
                "--weights none instead of the recipe's DEFAULT, which does not go with --model mine:net",
                "--freeze none instead of the recipe's backbone, which does not go with --model mine:net",
            ],
        ),
        ("imagenet-resnet50-modern --data webdataset", {"data": "webdataset"}, []),
        (
            "imagenet-resnet50-modern --data hf:saved --data-columns image=img label=fine",
            {"data": "hf:saved", "data_columns": ("image=img", "label=fine")},
            [],
        ),
        (
            "imagenet-resnet50-modern --data synthetic",
            {"data": "synthetic", "val_crop_size": None, "val_resize_size": None},
            [
                "--val-crop-size none instead of the recipe's 224, which does not go with --data synthetic",
                "--val-resize-size none instead of the recipe's 232, which does not go with --data synthetic",
            ],
        ),
    ],
)
def test_a_recipe_gives_way_to_what_is_typed(
    typed: str, changes: dict[str, object], notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With a note for each setting that does; what does not conflict stays as it is."""
    assert parse_train(typed.split()) == recipes.get(typed.split()[0]).replace(**changes)
    assert capsys.readouterr().err.splitlines() == [f"hvd-train: {note}" for note in notes]


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_can_be_tried_for_an_epoch(name: str) -> None:
    """With nothing to look up first."""
    assert parse_train([name, "--epochs", "1"]).schedule.epochs == 1


def test_one_rank_speaks_for_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them has read the same flags."""
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    assert not parse_train(["digits", "--optimizer", "adam"]).optimizer.nesterov
    assert capsys.readouterr().err == ""

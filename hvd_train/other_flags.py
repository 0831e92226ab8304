"""Flags of other programs that people come from (PyTorch's and Horovod's examples, Lightning, Accelerate, timm, Apex).

A flag that is only called otherwise is answered with our name for it, and one that has no counterpart with what to do.
None of them is obeyed: a flag of the same name often means something else there (`--workers` of PyTorch's example is a
number for each host, `--base-lr` of Horovod's is multiplied by the number of ranks).
"""

from __future__ import annotations

_NAMES = {
    "--batch-size": ("--batch", "--bs", "--per-device-train-batch-size", "--train-batch-size"),
    "--eval-batch-size": ("--per-device-eval-batch-size", "--test-batch-size", "--val-batch-size"),
    "--accumulation-steps": (
        *(
            "--accumulate-grad-batches",
            "--batches-per-allreduce",
            "--grad-accum-steps",
            "--gradient-accumulation-steps",
        ),
        *("--backward-passes-per-step", "--iters-to-accumulate"),
    ),
    "--augment": ("--aa", "--auto-augment", "--augmentation"),
    "--clip-norm": ("--clip-grad", "--clip-grad-norm", "--gradient-clip-val", "--max-grad-norm", "--grad-clip"),
    "--commit-steps": ("--checkpoint-every", "--save-every", "--save-freq", "--save-steps"),
    "--compile": ("--torch-compile", "--torchcompile"),
    "--data": ("--dataset", "--dataset-name"),
    "--device": ("--accelerator",),
    "--ema-decay": ("--ema", "--model-ema", "--model-ema-decay"),
    "--epochs": ("--max-epochs", "--n-epochs", "--num-epochs", "--num-train-epochs", "--total-epochs"),
    "--eval-epochs": ("--check-val-every-n-epoch", "--eval-every", "--eval-freq", "--val-interval"),
    "--gpu-ids": ("--gpu", "--gpu-id", "--cuda-device"),
    "--image-size": ("--img-size", "--imgsz", "--input-size", "--train-crop-size"),
    "--keep-checkpoints": ("--checkpoint-hist", "--save-top-k", "--save-total-limit"),
    "--log-steps": ("--disp-batches", "--log-every", "--log-every-n-steps", "--log-interval", "--print-freq"),
    "--max-steps": ("--limit-train-batches", "--max-iters", "--max-iterations", "--max-train-steps", "--num-steps"),
    "--mixup": ("--mixup-alpha",),
    "--cutmix": ("--cutmix-alpha",),
    "--model": ("--model-name", "--net", "--network", "--backbone"),
    "--momentum": ("--mom",),
    "--optimizer": ("--opt", "--optim"),
    "--output-dir": ("--default-root-dir", "--exp-dir", "--out-dir", "--output", "--save-dir", "--work-dir"),
    "--patience": ("--early-stop", "--early-stopping", "--early-stopping-patience"),
    "--random-erasing": ("--random-erase", "--reprob"),
    "--repeated-augmentation": ("--aug-repeats", "--ra-reps"),
    "--schedule": ("--lr-schedule", "--lr-scheduler", "--lr-scheduler-type", "--sched", "--scheduler"),
    "--seed": ("--manual-seed", "--random-seed", "--seed-everything"),
    "--label-smoothing": ("--smoothing",),
    "--sync-batch-norm": ("--sync-batchnorm", "--sync-bn", "--syncbn"),
    "--target-accuracy": ("--target-acc", "--desired-accuracy"),
    "--warmup-epochs": ("--lr-warmup-epochs", "--warmup"),
    "--weight-decay": ("--wd",),
    "--min-learning-rate": ("--eta-min", "--lr-min", "--min-lr"),
    "--workers": ("--dataloader-num-workers", "--num-workers", "--nw"),
}

_LINES = {
    "mixed precision is --precision fp16 or bf16; the weights stay in fp32, as Apex's O1 and O2 keep them": (
        *("--amp", "--amp-dtype", "--apex", "--autocast", "--bf16", "--fp16", "--half", "--mixed-precision"),
        *("--opt-level", "--use-amp", "--use-fp16", "--use-mixed-precision"),
    ),
    "the loss of --precision fp16 is scaled by itself, as much as its gradients allow": (
        *("--dynamic-loss-scale", "--loss-scale", "--static-loss-scale"),
    ),
    "batch norm has fp32 numbers with every --precision": ("--keep-batchnorm-fp32",),
    "checkpoints are kept in the run folder, --output-dir, and the same command goes on from the newest one; --resume "
    "FILE starts a new run from a file": (
        *("--auto-resume", "--checkpoint", "--checkpoint-dir", "--checkpoint-format", "--checkpoint-path", "--ckpt"),
        *("--ckpt-path", "--load", "--resume-from", "--resume-from-checkpoint", "--save-checkpoint", "--start-epoch"),
    ),
    "the data are in one folder: --data folder --data-dir DIR, with DIR/train, DIR/val and, if you like, DIR/test": (
        *("--data-path", "--data-root", "--datadir", "--root", "--test-dir", "--train-data", "--train-dir"),
        *("--traindir", "--val-dir", "--valdir"),
    ),
    "gradients travel in fp16 with --compression fp16": ("--fp16-allreduce",),
    "Adasum is --reduction adasum": ("--use-adasum",),
    "the learning rate follows the global batch with --lr-scaling linear, from --learning-rate for one of "
    "--lr-base-batch": ("--base-lr", "--scale-learning-rate", "--scale-lr"),
    "the newest weights of torchvision's model are --weights DEFAULT": ("--pretrained",),
    "a run is evaluated by `hvd-train evaluate RUN`": ("-e", "--eval", "--eval-only", "--evaluate", "--test-only"),
    "a CPU is chosen by --device cpu": ("--cpu", "--no-cuda", "--no-gpu", "--use-cpu"),
    "GPUs are used where there are any; --device cuda insists on them": ("--cuda", "--use-cuda", "--use-gpu"),
    "random images are --data synthetic": ("--dummy",),
    "ranks train by Horovod, whether or not a step uses all parameters; `hvd-train train --np N` starts them": (
        *("--backend", "--ddp", "--deepspeed", "--distributed", "--find-unused-parameters", "--fsdp", "--strategy"),
    ),
    "ranks are started by `hvd-train train --np N`, on several hosts with --hosts FILE": (
        *("--devices", "--nprocs", "--num-machines", "--num-processes"),
    ),
    "--trial takes a few steps, a part of each evaluation, and writes all files": (
        *("--dry-run", "--limit-val-batches", "--local-mode", "--overfit-batches"),
    ),
    "TensorBoard's files are in the run folder: `tensorboard --logdir runs` shows all": (
        *("--logdir", "--tb-dir", "--tensorboard", "--tensorboard-dir"),
    ),
    "an optimizer is given more by --optimizer-args, as in --optimizer-args betas=[0.9,0.95] eps=1e-6": (
        *("--alpha", "--amsgrad", "--betas", "--eps"),
    ),
    "steps down are --schedule step --decay-epochs 30 60 80 --decay-factor 0.1": (
        *("--gamma", "--lr-decay", "--lr-gamma", "--lr-step-size", "--milestones", "--step-size"),
    ),
    "what is shown follows from --progress bar|lines and --log-steps": ("-q", "--quiet", "-v", "--verbose"),
    "batches are pinned and copied ahead without a flag": (
        *("--pin-mem", "--pin-memory", "--prefetch", "--prefetch-factor"),
    ),
}
_OURS = {name: ours for ours, names in _NAMES.items() for name in names}
_TOLD = {name: line for line, names in _LINES.items() for name in names}


def told(flag: str) -> str | None:
    """Return what to tell a user who has typed a flag of another program; None where it is known from none."""
    if flag in _OURS:
        return f"{flag} is called {_OURS[flag]} here"
    return f"{flag}: {_TOLD[flag]}" if flag in _TOLD else None

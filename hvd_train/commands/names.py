"""The names of all commands, their usage, and where their functions are."""

COMMANDS = {
    "train": (
        "train",
        "[RECIPE] [FLAGS] [--np N]",
        "train a recipe (default: digits), changed by flags",
    ),
    "launch": (
        "launch",
        "[OPTIONS] -- COMMAND",
        "start ranks: here, over ssh, with mpirun, Slurm, Docker; or elastic",
    ),
    "evaluate": (
        "runs",
        "RUN|CHECKPOINT [FLAGS]",
        "scores of a run's best weights, a checkpoint or a model-best.pt",
    ),
    "predict": ("runs", "RUN|CHECKPOINT IMAGE|FOLDER ...", "the most probable classes of images"),
    "config": (
        "train",
        "[RECIPE] [FLAGS] [--trust]",
        "check and print the settings of `train`, for --config FILE",
    ),
    "audit": (
        "runs",
        "RUN",
        "check that every sample counted exactly once (of a run with --ledger)",
    ),
    "sweep": (
        "sweep",
        "[RECIPE] [FLAGS] [--np N]",
        "a training for each combination: --lr 0.1,0.05",
    ),
    "bench": (
        "bench",
        "throughput|scaling [RECIPE] [FLAGS]",
        "measure; `hvd-train bench` says more",
    ),
    "prove": (
        "prove",
        "python FILE.py ...",
        "run a script alone, resumed, on 3 ranks, with a worker killed; compare",
    ),
    "export": (
        "runs",
        "RUN|CHECKPOINT",
        "weights and a program of the trained model (torch.export)",
    ),
    "report": (
        "runs",
        "RUN [RUN ...]",
        "one page about runs: curves, throughput, differences; opens anywhere",
    ),
    "valprep": ("valprep", "DIR", "sort ImageNet's validation images into class folders"),
    "watch": ("runs", "RUN", "the state of a running or finished training, in the terminal"),
    "doctor": (
        "machines",
        "[--hosts FILE]",
        "what this machine and this build of Horovod can do, or a whole cluster",
    ),
    "completion": (
        "completion",
        "bash|zsh",
        "a script for the TAB key: source <(hvd-train completion bash)",
    ),
}
"""The module of a command's function, what follows its name, and what it does; RANKED
may run on several ranks."""
RANKED = ("train", "evaluate", "bench")

"""Check the trainer on real GPUs: `make gpu-check`, or python -m benchmarks.gpu_check [--stages sums,speed].

Each check prints one line with its verdict, and a table follows at the end. The JSON record of --out is complete after
each check. A wrong sum ends the run, since it makes all other results meaningless. A stage that takes longer than
--minutes is cut off, and the next one starts. One GPU is enough: with NCCL 2.30 or newer up to four ranks share it.
`--device cpu` runs the same checks with small sizes on a CPU, to test this program. Exit code 1: a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from benchmarks.speed import ENVIRONMENT, ROOT
from hvd_train.doctor import questions
from hvd_train.doctor.children import Child, Children, Outcome, children
from hvd_train.run_files.ledger import LEDGER, audit
from hvd_train.run_files.run_folder import METRICS

SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
DIGITS = "digits --epochs 1 --global-batch-size 480 --augment none --compression none --learning-rate 0.1"
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}  # cuDNN would convolve fp32 in TF32, whose significand has 10 bits
# By name: ranks, flags, and the largest difference from the weights of fp32 on the CPU, over the distance of training.
WAYS: dict[str, tuple[int, str, float]] = {
    "alone": (0, "", 1e-4),
    "channels last": (0, "--channels-last on", 1e-3),
    "accumulation": (0, "--batch-size 8", 1e-4),
    "torch.compile": (0, "--compile", 1e-4),
    "fp16": (0, "--precision fp16", 2e-2),
    "bf16": (0, "--precision bf16", 1e-1),
    "2 ranks": (2, "", 1e-4),
    "2 ranks, fp16 wire": (2, "--compression fp16", 2e-3),
    "2 ranks, deterministic": (2, "--deterministic", 1e-4),
    "4 ranks": (4, "", 1e-4),
    "4 ranks, fp16": (4, "--precision fp16 --compression fp16", 2e-2),
}
AIM = 0.97  # the least speed of our step, over that of a bare loop
Seen = tuple[str, dict[str, Any]]
"""What a check saw: a sentence for the table, and figures for the record."""


class Failed(Exception):
    """A check failed: what it saw, and figures if it has any."""


class Check:
    """The machine, the folder for all output, and the findings so far."""

    def __init__(self, options: argparse.Namespace, group: Children, folder: Path) -> None:
        self.device, self.gpu, self.out, self.group, self.folder = (
            options.device,
            options.device == "cuda",
            options.out,
            group,
            folder,
        )
        self.stage, self.deadline, nccl = "", time.monotonic() + 120, ctypes.c_int()
        facts = questions.answer(self.start(f"{sys.executable} -c", extra=[questions.TORCH]).outcome())
        self.gpus = len(facts.get("gpus", ()))
        if self.gpu and not self.gpus:
            sys.exit("gpu-check: torch sees no GPU; `hvd-train doctor` says why")
        with contextlib.suppress(OSError, AttributeError):  # torch reports the NCCL that it was compiled with
            ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(nccl))
        shares = self.gpus == 1 and nccl.value >= 23000
        self.most_ranks = (4 if shares else self.gpus) if self.gpu else 2
        command = " ".join(["python -m benchmarks.gpu_check", *sys.argv[1:]])
        machine = {"gpus": facts.get("gpus", ()), "cores": len(os.sched_getaffinity(0)), "torch": facts.get("version")}
        machine["nccl"] = nccl.value
        self.record = {"command": command, "date": time.strftime("%Y-%m-%d"), "machine": machine}
        self.findings: list[dict[str, Any]] = []

    def start(
        self, line: str, ranks: int = 0, limit_s: float = 120, extra: list[str] | None = None, **variables: str
    ) -> Child:
        """Start a command in the output folder, on that many ranks of horovodrun if `ranks` is not 0."""
        shared = SHARED_GPU if self.gpu and ranks > self.gpus else {}
        launcher = ["horovodrun", "--gloo", "-np", str(ranks)] if ranks else []
        names = [f"{name}={value}" for name, value in {**shared, **variables}.items()]
        limit_s = max(1.0, min(limit_s, self.deadline - time.monotonic()))
        return self.group.start(["env", "-C", self.folder, *names, *launcher, *line.split(), *(extra or [])], limit_s)

    def outcome(self, name: str, child: Child) -> Outcome:
        """Wait for a command, and write its output to NAME.log."""
        outcome = child.outcome()
        (self.folder / f"{slug(name)}.log").write_text(outcome.output, encoding="utf-8")
        return outcome

    def finish(self, name: str, child: Child) -> str:
        """Wait for a command and return its output. Raises Failed if it fails or does not end in time."""
        outcome = self.outcome(name, child)
        if outcome.code != 0:
            why = f"no end in {outcome.seconds:.0f} s" if outcome.code is None else f"exit code {outcome.code}"
            raise Failed(f"{why}: {questions.first_error(outcome.output)}")
        return outcome.output

    def job(self, name: str, arguments: str = "", ranks: int = 0, **variables: str) -> list[Any]:
        """Run a job of `benchmarks.gpu_jobs` and return what its ranks reported."""
        line = f"{sys.executable} -m benchmarks.gpu_jobs {name} {self.device} {arguments}"
        output = self.finish(f"{name} {arguments} {ranks}", self.start(line, ranks, **variables))
        return [json.loads(text) for text in re.findall(r"gpu-check: (.*)$", output, re.MULTILINE)]

    def bench(self, name: str, line: str, ranks: int = 0) -> dict[str, Any]:
        """Run `hvd-train bench` and return its record."""
        self.finish(name, self.start(f"hvd-train bench {line} --device {self.device} --json {name}.json", ranks))
        record: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return record

    def find(self, name: str, look: Callable[[], Seen]) -> bool:
        """Make a check, record and print how it ended, and return whether it passed."""
        began = time.monotonic()
        try:
            verdict, (what, figures) = "passed", look()
        except Failed as failure:
            verdict, (what, figures) = "failed", (*failure.args, {})[:2]
        except Exception as error:  # noqa: BLE001  # one broken check must not end the others
            verdict, what, figures = "failed", f"the check broke: {type(error).__name__}: {error}", {}
        self.add(name, verdict, what, seconds=round(time.monotonic() - began, 1), **figures)
        return verdict == "passed"

    def add(self, name: str, verdict: str, what: str, **figures: Any) -> None:
        """Add a finding to the record on disk, and print it."""
        self.findings.append({"stage": self.stage, "check": name, "verdict": verdict, "what": what, **figures})
        print(f"{self.stage}: {name}: {verdict}: {what}", flush=True)
        if self.out:
            self.out.write_text(json.dumps({**self.record, "findings": self.findings}, indent=1) + "\n")


def doctor(check: Check) -> None:
    """Ask `hvd-train doctor`: what it calls broken has failed."""
    output = check.outcome("doctor", check.start("hvd-train doctor --json")).output
    for one in json.loads(output[output.index("{") :])["findings"]:
        check.add(one["name"], "failed" if one["verdict"] == "broken" else "passed", f"{one['verdict']}: {one['what']}")


def sums(check: Check) -> None:
    """Reduce groups of tensors whose sums every format holds exactly, on 1 rank up to the most."""

    def exact(ranks: int) -> Seen:
        reports = check.job("sums", "5 10007 3000017" if check.gpu else "5 1003", ranks)
        wrong = [name for report in reports for name in report["wrong"]]
        if wrong or len(reports) != ranks:
            raise Failed(f"{len(reports)} ranks reported {len(wrong)} wrong results: {wrong[:1]}")
        return f"{reports[0]['tried']} tensors in groups of fp16, fp32 and both: exact on every rank", {}

    for ranks in range(1, check.most_ranks + 1):
        check.find(f"{ranks} ranks", partial(exact, ranks))


def equality(check: Check) -> None:
    """Train the digits for three steps in several ways, and compare the weights with fp32 on the CPU."""
    plans = {"cpu": (0, "--device cpu"), "start": (0, "--device cpu --learning-rate 1e-30 --weight-decay 0")}
    ways = {name: way for name, way in WAYS.items() if way[0] <= check.most_ranks}
    plans |= {name: (ranks, f"--device {check.device} {flags}") for name, (ranks, flags, _) in ways.items()}
    names, running = list(plans), dict[str, Child]()
    for place, (name, (ranks, flags)) in enumerate(plans.items()):
        line = f"hvd-train train {DIGITS} {flags} --output-dir {slug(name)}"
        running[name] = check.start(line, ranks, **NO_TF32)
        if place >= 4:  # five trainings at a time
            running[names[place - 4]].outcome()

    def compare(name: str) -> Seen:
        check.finish(f"train {name}", running[name])
        cpu, start, weights = (weights_of(check.folder / slug(one)) for one in ("cpu", "start", name))
        difference, bound = distance(weights, cpu) / distance(start, cpu), ways[name][2]
        if not difference <= bound:  # NaN fails, too
            raise Failed(f"difference {difference:.1e}, above {bound:.0e}")
        return f"difference {difference:.1e}, at most {bound:.0e}", {"difference": difference}

    for name in ways:
        check.find(name, partial(compare, name))


def slug(name: str) -> str:
    """Return a name for files."""
    return re.sub(r"\W+", "-", name)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the final weights of a run, as float64."""
    state = torch.load(folder / "model-final.pt", map_location="cpu", weights_only=True)
    return {name: tensor.double() for name, tensor in state.items()}


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the Euclidean distance of two sets of weights."""
    return math.sqrt(sum(float(((one[name] - other[name]) ** 2).sum()) for name in one))


def faults(check: Check) -> None:
    """Kill and stop workers of an elastic job, kill a rank of a static one, and keep the GPU busy before a sum."""
    if check.most_ranks < 2:
        return check.add("faults", "not run", "they take two ranks: two GPUs, or one and NCCL 2.30")
    ranks, run = min(3, check.most_ranks), check.folder / "elastic"
    shared = SHARED_GPU if check.gpu and ranks > check.gpus else {}
    (check.folder / "hosts").write_text(f"localhost slots={ranks}\n")
    line = (
        f"bash {ROOT}/horovodrun_scripts/train_elastic.sh --hosts hosts -np {ranks} -- digits --epochs 1000000 --ledger"
    )
    child = check.start(f"{line} --eval-epochs 1000 --device {check.device} --output-dir elastic", 0, 600, **shared)

    def events() -> list[dict[str, Any]]:
        lines = (run / METRICS).read_text().splitlines()
        return [json.loads(line) for line in lines if '"name": "world"' in line and line.endswith("}")]

    def more_steps() -> float:
        size = (run / LEDGER).stat().st_size if (run / LEDGER).exists() else 0
        return wait(child, lambda: (run / LEDGER).exists() and (run / LEDGER).stat().st_size > size + 500)

    def strike(number: signal.Signals, rank_0: bool) -> Seen:
        before, memory = len(events()), used_mib()
        writes = {one: str(run / METRICS) in {file.path for file in one.open_files()} for one in workers(child)}
        next(worker for worker, is_rank_0 in writes.items() if is_rank_0 == rank_0).send_signal(number)
        survivors = wait(child, lambda: len(events()) > before)
        everyone = survivors + wait(child, lambda: events()[-1]["world_size"] == ranks)
        more_steps()
        lost = sum(int(event["steps_lost"]) for event in events()[before:])
        if lost:
            raise Failed(f"{lost} steps lost")
        figures = {"survivors_s": survivors, "all_ranks_s": everyone, "gpu_mib": [memory, used_mib()]}
        return f"survivors train after {survivors:.1f} s, all {ranks} after {everyone:.1f} s, no step lost", figures

    def end() -> Seen:
        assert child.process is not None
        child.process.send_signal(signal.SIGTERM)
        code, report = check.outcome("elastic", child).code, audit(run)
        if code != 128 + signal.SIGTERM or report.faults:
            raise Failed(f"exit code {code} after SIGTERM; audit: {report.faults[:1] or 'exact'}")
        return f"{report.steps:,} steps in worlds of {report.world_sizes} ranks, every sample once per epoch", {}

    if check.find("first steps", lambda: (f"after {more_steps():.1f} s, {used_mib()} MiB of GPU memory in use", {})):
        check.find("kill -9 of a rank", partial(strike, signal.SIGKILL, rank_0=False))
        check.find("kill -9 of rank 0", partial(strike, signal.SIGKILL, rank_0=True))
        check.find("SIGSTOP of a rank", partial(strike, signal.SIGSTOP, rank_0=False))
    check.find("audit", end)
    check.find("static job", partial(static, check))
    check.find("busy GPU", partial(busy, check))
    return None


def static(check: Check) -> Seen:
    """Kill a rank of a static job with kill -9, and run the same command again."""
    line = f"hvd-train train digits --device {check.device} --ledger --commit-steps 100 --epochs 20 --output-dir static"
    child = check.start(line, 2)
    wait(child, lambda: any((check.folder / "static" / "checkpoints").glob("*.ckpt")))
    began = time.monotonic()
    workers(child)[-1].kill()
    code, seconds = check.outcome("static", child).code, time.monotonic() - began
    if code in (None, 0):
        raise Failed(f"exit code {code}: the job did not end by itself in {seconds:.0f} s")
    check.finish("static again", check.start(line, 2))
    if found := audit(check.folder / "static").faults:
        raise Failed(f"audit after the resume: {found[0]}")
    return f"exit code {code} after {seconds:.1f} s; the same command resumed, every sample once per epoch", {}


def busy(check: Check) -> Seen:
    """Sum behind 8 s of work with a limit of 5 s for a silent rank: no rank is silent, so the sum must be right."""
    limits = {"HOROVOD_ELASTIC": "1", "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": "5"}
    if wrong := [text for text in check.job("busy", "8", 2, **limits) if text != "right"]:
        raise Failed(f"{len(wrong)} of 2 ranks: {wrong[0]}")
    return "8 s of work before a sum, with a limit of 5 s for a silent rank: the sum is right", {}


def wait(child: Child, condition: Callable[[], object], limit_s: float = 60) -> float:
    """Wait for a condition and return the seconds. Raises Failed after `limit_s`, or if the job ends."""
    began = time.monotonic()
    while not condition():
        if child.process is None or child.process.poll() is not None or time.monotonic() - began > limit_s:
            raise Failed(f"waited {time.monotonic() - began:.0f} s, or the job ended")
        time.sleep(0.05)
    return time.monotonic() - began


def workers(child: Child) -> list[psutil.Process]:
    """Return the ranks that a launcher has started, oldest first."""
    found = psutil.Process(child.process.pid).children(recursive=True) if child.process else []
    ranks = []
    for one in found:
        with contextlib.suppress(psutil.Error):
            ranks += [one] if any(word.endswith("/hvd-train") for word in one.cmdline()[:2]) else []
    return sorted(ranks, key=psutil.Process.create_time)


def used_mib() -> int | None:
    """Return the MiB in use on all GPUs, or None without a driver."""
    query = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits"
    output = subprocess.run(query, shell=True, capture_output=True, text=True, check=False).stdout.split()  # noqa: S602
    return sum(map(int, output)) if output else None


def speed(check: Check) -> None:
    """Compare our step with bare loops on ResNet-50 with images of 224 pixels, and count what a step costs the CPU."""
    sizes = "--steps 20 --repetitions 3" if check.gpu else "--image-size 32 --steps 3 --repetitions 2"
    line = f"throughput imagenet-resnet50 --data synthetic --augment none --synthetic-samples 10000000 {sizes}"

    def compare(precision: str, ranks: int, peer: str) -> Seen:
        precision, batch = (precision, 208 // ranks) if check.gpu else ("fp32", 8 // ranks)
        launched = ranks if peer == "horovod" else 0
        flags = f"--batch-size {batch} --precision {precision}"
        record = check.bench(f"throughput-{peer}-{precision}-{ranks}", f"{line} {flags}", launched)
        other, mine = max(check.job("bare", f"{peer} {batch} {precision}", launched)), record["seconds_per_step"]
        figures = {"ours_ms": 1000 * mine, "other_ms": 1000 * other, "ratio": other / mine, "split": record["split"]}
        seen = f"{other / mine:.3f} of its images/s: {batch * ranks / mine:,.0f} images/s"
        seen += f", {1000 * mine:.1f} and {1000 * other:.1f} ms a step"
        if check.gpu and other / mine < AIM:
            raise Failed(f"{seen}, below {AIM}", figures)
        return seen, figures

    check.find("fp16, bare torch loop", partial(compare, "fp16", 1, "torch"))
    check.find("bf16, bare torch loop", partial(compare, "bf16", 1, "torch"))
    for ranks in sorted({1, min(2, check.most_ranks)}):
        check.find(f"fp16, {ranks} ranks, bare Horovod loop", partial(compare, "fp16", ranks, "horovod"))

    def profile(kind: str) -> Seen:
        (report,) = check.job("profile", f"{kind} {'208 fp16' if check.gpu else '8 fp32'}")
        return ", ".join(f"{name} {count:.4g}" for name, count in report.items()), report

    for kind in ("torch", "ours"):
        check.find(f"a step in numbers: {kind}", partial(profile, kind))


def inputs(check: Check) -> None:
    """Read JPEG files of the size of photographs with several loader processes, alone and with ResNet-50."""
    root, (total, different) = check.folder / "photographs", (6000, 480) if check.gpu else (64, 16)
    paths = [root / "train" / str(number % 4) / f"{number:05}.jpg" for number in range(total)]
    for folder in {path.parent for path in paths}:
        folder.mkdir(parents=True)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(write_photograph, paths[:different], chunksize=8))
    for number in range(different, total):  # copies, since drawing a file takes longer than reading it
        shutil.copyfile(paths[number % different], paths[number])
    (root / "val").symlink_to("train")
    line = "imagenet-resnet50 --data-dir photographs --batch-size"
    line += " 208" if check.gpu else " 8 --image-size 64 --precision fp32"

    def measure(tool: str, workers: int, times: str) -> Seen:
        record = check.bench(f"{tool}-{workers}", f"{tool} {line} --workers {workers} {times}")
        kept = ("images_per_second", "limited_by", "stages", "split")
        return f"{record['images_per_second']:,.0f} images/s", {name: record[name] for name in kept if name in record}

    most = min(16, len(os.sched_getaffinity(0)))
    for workers in sorted({4, 8, most} & set(range(most + 1))):
        check.find(f"{workers} processes", partial(measure, "input", workers, "--seconds 2 --repetitions 2"))
    check.find(f"{most} processes, ResNet-50", partial(measure, "throughput", most, "--steps 10 --repetitions 2"))


def write_photograph(path: Path) -> None:
    """Write a JPEG file of 500 x 375 pixels."""
    from benchmarks.input import photograph

    photograph(np.random.default_rng(int(path.stem)), 375, 500).save(path, quality=90)


def memory(check: Check) -> None:
    """Train with a batch that does not fit: the error must be one clear line."""

    def too_large() -> Seen:
        line = "hvd-train train imagenet-resnet50 --data synthetic --augment none --batch-size 8192 --device cuda"
        outcome = check.outcome("too large", check.start(f"{line} --synthetic-samples 16384 --output-dir too-large"))
        lines = outcome.output.strip().splitlines() or ["nothing"]
        if outcome.code in (None, 0) or "Traceback" in outcome.output or "memory" not in lines[-1]:
            raise Failed(f"exit code {outcome.code}, {len(lines)} lines: {questions.first_error(outcome.output)}")
        return f"exit code {outcome.code}: {lines[-1]}", {}

    if check.gpu:
        check.find("a batch that is too large", too_large)


STAGES = {stage.__name__: stage for stage in (doctor, sums, equality, faults, speed, inputs, memory)}


def main() -> int:
    """Run the stages, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES), help=f"some of {','.join(STAGES)} (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=5, help="the most that a stage may take (default: 5)")
    parser.add_argument("--out", type=Path, help="the file for the record")
    parser.add_argument("--folder", type=Path, help="the folder for all output (default: a temporary one)")
    options = parser.parse_args()
    stages = options.stages.split(",")
    if unknown := set(stages) - set(STAGES):
        parser.error(f"--stages: no stage {', '.join(sorted(unknown))}; they are {', '.join(STAGES)}")
    with children(ENVIRONMENT) as group, tempfile.TemporaryDirectory(prefix="gpu-check-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        check = Check(options, group, folder)
        for name in stages:
            check.stage, check.deadline = name, time.monotonic() + 60 * options.minutes
            try:
                STAGES[name](check)
            except Exception as error:  # noqa: BLE001  # the next stage may still work
                check.add("stage", "failed", f"{type(error).__name__}: {error}")
            if name == "sums" and any(one["verdict"] == "failed" for one in check.findings):
                print("gpu-check: stopped, since sums over the ranks are wrong")
                break
    print("\n".join(f"{one['verdict']:7} {one['stage']:9} {one['check']:32} {one['what']}" for one in check.findings))
    return int(any(one["verdict"] == "failed" for one in check.findings))


if __name__ == "__main__":
    sys.exit(main())

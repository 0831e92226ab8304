"""Check the trainer on real GPUs: `make gpu-check`, or python -m benchmarks.gpu_check [--stages sums,speed].

Each check prints one line with its verdict. The JSON record of --out is complete after each check. A wrong sum ends the
run, since it makes all other results meaningless. A stage is cut off after five minutes. One GPU is enough: with NCCL
2.30 or newer up to four ranks share it. `--device cpu` runs the same checks with small sizes, to test this program.
Exit code 1: a check failed.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.turns import ROOT
from hvd_train.run_files.ledger import LEDGER, audit
from hvd_train.run_files.run_folder import METRICS
from tests.support.launching import finished, ranks_of, started, wait_for

SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
DIGITS = "digits --epochs 1 --global-batch-size 480 --augment none --compression none --learning-rate 0.1"
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
STRIKES = (
    ("kill -9 of a rank", signal.SIGKILL, False),
    ("kill -9 of rank 0", signal.SIGKILL, True),
    ("SIGSTOP of a rank", signal.SIGSTOP, False),
)
AIM = 0.97  # the least speed of our step, over that of a bare loop
Seen = tuple[str, dict[str, Any]]  # what a check saw: a sentence, and figures for the record


class Failed(Exception):
    """A check failed: what it saw, and figures if it has any."""


class Check:
    """The machine, the folder for all output, and the findings so far."""

    def __init__(self, device: str, out: Path | None, folder: Path) -> None:
        self.device, self.gpu, self.out, self.folder = device, device == "cuda", out, folder
        self.stage, self.deadline, gpus, nccl = "", 0.0, torch.cuda.device_count(), ctypes.c_int()
        if self.gpu and not gpus:
            sys.exit("gpu-check: torch sees no GPU; type `hvd-train doctor`")
        with contextlib.suppress(OSError, AttributeError):  # torch reports the NCCL that it was compiled with
            ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(nccl))
        shares = gpus == 1 and nccl.value >= 23000
        self.most_ranks = (4 if shares else gpus) if self.gpu else 2
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        self.variables = {"CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": str(ROOT), **(SHARED_GPU if shares else {})}
        names = [torch.cuda.get_device_name(number) for number in range(gpus)]
        machine = {"gpus": names, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "nccl": nccl.value}
        command = " ".join(["python -m benchmarks.gpu_check", *sys.argv[1:]])
        self.record = {"command": command, "date": time.strftime("%Y-%m-%d"), "machine": machine}
        self.findings: list[dict[str, Any]] = []

    def run(self, line: str, ranks: int = 0, **variables: str) -> str:
        """Run a command, under horovodrun if `ranks` is not 0, and return its output. Raises Failed."""
        limit_s = max(1.0, min(120.0, self.deadline - time.monotonic()))
        code, output = finished(_command_of(line, ranks), self.folder, limit_s, {**self.variables, **variables})
        if code:
            errors = re.findall(r"\w*(?:Error|Exception|hvd-train): .*", output) or output.splitlines()[-1:]
            raise Failed(f"exit code {code}: {''.join(errors[-1:])[:300]}")
        return output

    def job(self, name: str, arguments: str, ranks: int, **variables: str) -> list[Any]:
        """Run one of JOBS and return the reports of its ranks."""
        line = f"{sys.executable} -m benchmarks.gpu_check {name} {self.device} {arguments}"
        reports = re.findall(r"gpu-check: (.*)$", self.run(line, ranks, **variables), re.MULTILINE)
        return [json.loads(text) for text in reports]

    def find(self, name: str, look: Callable[[], Seen]) -> None:
        """Make a check, record and print its verdict."""
        began = time.monotonic()
        try:
            verdict, (what, figures) = "passed", look()
        except Exception as error:  # noqa: BLE001  # one broken check must not end the others
            seen = error.args if isinstance(error, Failed) else (f"{type(error).__name__}: {error}",)
            verdict, (what, figures) = "failed", (*seen, {})[:2]
        finding = {"stage": self.stage, "check": name, "verdict": verdict, "what": what}
        self.findings.append({**finding, "seconds": round(time.monotonic() - began, 1), **figures})
        print(f"{self.stage}: {name}: {verdict}: {what}", flush=True)
        if self.out:
            self.out.write_text(json.dumps({**self.record, "findings": self.findings}, indent=1) + "\n")


def _command_of(line: str, ranks: int) -> list[str]:
    return [*(["horovodrun", "--gloo", "-np", str(ranks)] if ranks else []), *line.split()]


def sums(check: Check) -> None:
    """Reduce groups of tensors whose sums every format holds exactly, on 1 rank up to the most."""

    def exact(ranks: int) -> Seen:
        reports = check.job("sum", "5 10007 3000017" if check.gpu else "5 1003", ranks)
        wrong = [name for report in reports for name in report["wrong"]]
        if wrong or len(reports) != ranks:
            raise Failed(f"{len(reports)} ranks reported {len(wrong)} wrong results: {wrong[:1]}")
        return f"{reports[0]['tried']} tensors in groups of fp16, fp32 and both: exact on every rank", {}

    for ranks in range(1, check.most_ranks + 1):
        check.find(f"{ranks} ranks", partial(exact, ranks))


def equality(check: Check) -> None:
    """Train the digits for three steps in several ways, and compare the weights with fp32 on the CPU."""

    def weights_of(name: str, ranks: int, flags: str) -> torch.Tensor:
        folder = re.sub(r"\W+", "-", name)
        # By default cuDNN would convolve fp32 in TF32, whose significand has 10 bits.
        line = f"hvd-train train {DIGITS} {flags} --output-dir {folder}"
        check.run(line, ranks, NVIDIA_TF32_OVERRIDE="0")
        state = torch.load(check.folder / folder / "model-final.pt", map_location="cpu", weights_only=True)
        return torch.cat([state[name].double().flatten() for name in sorted(state)])

    cpu = weights_of("cpu", 0, "--device cpu")
    start = weights_of("start", 0, "--device cpu --learning-rate 1e-30 --weight-decay 0")

    def compare(name: str) -> Seen:
        ranks, flags, bound = WAYS[name]
        weights = weights_of(name, ranks, f"--device {check.device} {flags}")
        difference = float((weights - cpu).norm() / (start - cpu).norm())
        if not difference <= bound:  # NaN fails, too
            raise Failed(f"difference {difference:.1e}, above {bound:.0e}")
        return f"difference {difference:.1e}, at most {bound:.0e}", {"difference": difference}

    for name, (ranks, _, _) in WAYS.items():
        if ranks <= check.most_ranks:
            check.find(name, partial(compare, name))


def faults(check: Check) -> None:
    """Kill and stop ranks of an elastic and a static job, and keep the GPU busy before a sum."""
    ranks, run = min(3, check.most_ranks), check.folder / "elastic"
    if ranks < 2:
        return print("faults: not run, they take two ranks: two GPUs, or one and NCCL 2.30")
    (check.folder / "hosts").write_text(f"localhost slots={ranks}\n")
    line = f"bash {ROOT}/horovodrun_scripts/train_elastic.sh --hosts hosts -np {ranks} -- digits --epochs 1000000"
    line += f" --ledger --eval-epochs 1000 --device {check.device} --output-dir elastic"
    with started(line.split(), check.folder, check.folder / "elastic.log", check.variables) as job:

        def end() -> Seen:
            job.send_signal(signal.SIGTERM)
            code, report = job.wait(60), audit(run)
            if code != 128 + signal.SIGTERM or report.faults:
                raise Failed(f"exit code {code} after SIGTERM; audit: {report.faults[:1] or 'exact'}")
            return f"{report.steps:,} steps in worlds of {report.world_sizes} ranks, every sample once per epoch", {}

        check.find(
            "first steps", lambda: (f"after {_more_steps(run):.1f} s, {_used_mib()} MiB of GPU memory in use", {})
        )
        for name, number, rank_0 in STRIKES:
            check.find(name, partial(strike, job, run, ranks, number, rank_0))
        check.find("audit", end)
    check.find("static job", partial(static, check))
    check.find("busy GPU", partial(busy, check))
    return None


def strike(job: subprocess.Popen[bytes], run: Path, ranks: int, number: signal.Signals, rank_0: bool) -> Seen:
    """Send a signal to a rank of an elastic job, and wait until the others train and until it is replaced."""

    def events() -> list[dict[str, Any]]:
        lines = (run / METRICS).read_text().splitlines()
        return [json.loads(line) for line in lines if '"name": "world"' in line and line.endswith("}")]

    before, memory = len(events()), _used_mib()
    writes = {one: str(run / METRICS) in {file.path for file in one.open_files()} for one in _workers(job)}
    next(worker for worker, is_rank_0 in writes.items() if is_rank_0 == rank_0).send_signal(number)
    survivors = _seconds_until("survivors", lambda: len(events()) > before)
    everyone = survivors + _seconds_until("all ranks", lambda: events()[-1]["world_size"] == ranks)
    _more_steps(run)
    if lost := sum(int(event["steps_lost"]) for event in events()[before:]):
        raise Failed(f"{lost} steps lost")
    figures = {"survivors_s": survivors, "all_ranks_s": everyone, "gpu_mib": [memory, _used_mib()]}
    return f"survivors train after {survivors:.1f} s, all {ranks} after {everyone:.1f} s, no step lost", figures


def static(check: Check) -> Seen:
    """Kill a rank of a static job with kill -9, and run the same command again."""
    line = f"hvd-train train digits --device {check.device} --ledger --commit-steps 100 --epochs 20 --output-dir static"
    with started(_command_of(line, 2), check.folder, check.folder / "static.log", check.variables) as job:
        wait_for("a commit", lambda: any((check.folder / "static" / "checkpoints").glob("*.ckpt")), 60)
        _workers(job)[-1].kill()
        code = job.wait(60)
    check.run(line, 2)
    found = audit(check.folder / "static").faults
    if code == 0 or found:
        raise Failed(f"exit code {code}; audit after the resume: {found[:1] or 'exact'}")
    return f"exit code {code}; the same command resumed, every sample once per epoch", {}


def busy(check: Check) -> Seen:
    """Sum behind 8 s of work with a limit of 5 s for a silent rank: no rank is silent, so the sum must be right."""
    limits = {"HOROVOD_ELASTIC": "1", "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": "5"}
    if wrong := [text for text in check.job("wait", "8", 2, **limits) if text != "right"]:
        raise Failed(f"{len(wrong)} of 2 ranks: {wrong[0]}")
    return "8 s of work before a sum, with a limit of 5 s for a silent rank: the sum is right", {}


def _workers(job: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [one for one in ranks_of(job, "train") if any(word.endswith("/hvd-train") for word in one.cmdline()[:2])]


def _seconds_until(what: str, condition: Callable[[], object]) -> float:
    began = time.monotonic()
    wait_for(what, condition, 60)
    return time.monotonic() - began


def _more_steps(run: Path) -> float:
    ledger = run / LEDGER
    size = ledger.stat().st_size if ledger.exists() else 0
    return _seconds_until("steps", lambda: ledger.exists() and ledger.stat().st_size > size + 500)


def _used_mib() -> int:
    return sum((total - free) >> 20 for free, total in map(torch.cuda.mem_get_info, range(torch.cuda.device_count())))


def speed(check: Check) -> None:
    """Compare our step with bare loops on ResNet-50 with images of 224 pixels."""
    sizes = "--steps 20 --repetitions 3" if check.gpu else "--image-size 32 --steps 3 --repetitions 2"
    line = "hvd-train bench throughput imagenet-resnet50 --data synthetic --augment none --synthetic-samples 10000000"
    line += f" {sizes} --device {check.device} --json throughput.json"

    def compare(precision: str, ranks: int, peer: str) -> Seen:
        precision, batch = (precision, 208 // ranks) if check.gpu else ("fp32", 8 // ranks)
        launched = ranks if peer == "horovod" else 0
        check.run(f"{line} --batch-size {batch} --precision {precision}", launched)
        record = json.loads((check.folder / "throughput.json").read_text())
        other, mine = max(check.job("bare", f"{peer} {batch} {precision}", launched)), record["seconds_per_step"]
        figures = {"ours_ms": 1000 * mine, "other_ms": 1000 * other, "ratio": other / mine, "split": record["split"]}
        rate = f"{other / mine:.3f} of its images/s: {batch * ranks / mine:,.0f} images/s"
        seen = f"{rate}, {1000 * mine:.1f} and {1000 * other:.1f} ms a step"
        if check.gpu and other / mine < AIM:
            raise Failed(f"{seen}, below {AIM}", figures)
        return seen, figures

    check.find("fp16, bare torch loop", partial(compare, "fp16", 1, "torch"))
    check.find("bf16, bare torch loop", partial(compare, "bf16", 1, "torch"))
    for ranks in sorted({1, min(2, check.most_ranks)}):
        check.find(f"fp16, {ranks} ranks, bare Horovod loop", partial(compare, "fp16", ranks, "horovod"))


def sum_job(device: str, *sizes: str) -> dict[str, Any]:
    """Return the number of tensors that were reduced over the ranks in groups, and the names of wrong results."""
    import horovod.torch as hvd

    tried, wrong = 0, list[str]()
    for batched in ("1", "0"):  # with and without Horovod's own kernels for copies
        os.environ["HOROVOD_BATCH_D2D_MEMCOPIES"] = batched
        hvd.init()
        n = hvd.size()
        # fp16 holds all these sums exactly, and averages if the division is exact.
        operations = {hvd.Sum: n * (n + 1) / 2, **({hvd.Average: (n + 1) / 2} if n & (n - 1) == 0 else {})}
        for size in map(int, sizes):
            for kinds in ([torch.float16], [torch.float32], [torch.float16, torch.float32]):
                for operation, factor in operations.items():
                    parts = [((torch.arange(size) + k) % 3, kind) for kind in kinds for k in range(5)]
                    group = [(part * (hvd.rank() + 1)).to(kind).to(device) for part, kind in parts]
                    name = f"{size} of {kinds}, operation {operation}, batched={batched}"
                    outputs = hvd.grouped_allreduce(group, name=name, op=operation)
                    tried += len(parts)
                    for output, (part, kind) in zip(outputs, parts, strict=True):
                        wrong += [] if torch.equal(output.cpu(), (part * factor).to(kind)) else [name]
        hvd.shutdown()
    return {"tried": tried, "wrong": wrong}


def wait_job(device: str, seconds: str) -> str:
    """Sum once to form communicators, then behind work that keeps the GPU busy for at least this long."""
    import horovod.torch as hvd

    hvd.init()
    sums, n = [], hvd.size()
    for number in range(2):
        values = torch.full((100_003,), float(hvd.rank() + number), device=device)
        if number and device == "cuda":
            torch.cuda._sleep(int(2.0e9 * float(seconds)))  # type: ignore[no-untyped-call]  # cycles, at 2 GHz at most
        sums += hvd.allreduce(values, name=f"sum {number}", op=hvd.Sum).unique().tolist()
    return "right" if sums == [n * (n - 1) / 2, n * (n + 1) / 2] else f"the sums are {sums[:4]}"


def bare_job(device: str, kind: str, batch: str, precision: str) -> float:
    """Return the median seconds of a step of ResNet-50 in a bare loop of `torch` or `horovod`."""
    import horovod.torch as hvd
    from torchvision import models

    torch.backends.cudnn.benchmark = True
    # Horovod refuses gradients that are not contiguous; cuDNN still computes in channels_last for such images.
    layout = torch.contiguous_format if kind == "horovod" else torch.channels_last
    model = models.resnet50().to(device, memory_format=layout)
    size, steps = (224, 20) if device == "cuda" else (32, 3)
    images = torch.randn(int(batch), 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (int(batch),), device=device)
    options: dict[str, Any] = {"lr": 1e-6, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    optimizer: Any = torch.optim.SGD(model.parameters(), fused=kind == "torch", **options)
    scaler: Any = torch.amp.GradScaler(device, enabled=precision == "fp16")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    if kind == "horovod":
        hvd.init()
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=hvd.Compression.fp16)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def seconds() -> float:
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            if kind == "horovod":
                optimizer.synchronize()
            with optimizer.skip_synchronize() if kind == "horovod" else contextlib.nullcontext():
                scaler.step(optimizer)
            scaler.update()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps

    return statistics.median([seconds() for _ in range(4)][1:])


JOBS: dict[str, Callable[..., Any]] = {"sum": sum_job, "wait": wait_job, "bare": bare_job}  # what ranks run
STAGES = {stage.__name__: stage for stage in (sums, equality, faults, speed)}


def main() -> int:
    """Run the stages and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES), help=f"some of {','.join(STAGES)} (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="the file for the record")
    options = parser.parse_args()
    stages = options.stages.split(",")
    if unknown := set(stages) - set(STAGES):
        parser.error(f"--stages: no stage {', '.join(sorted(unknown))}; they are {', '.join(STAGES)}")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        check = Check(options.device, options.out and options.out.resolve(), Path(folder))
        for name in stages:
            check.stage, check.deadline = name, time.monotonic() + 300
            check.find("whole stage", lambda: (STAGES[check.stage](check), ("done", {}))[1])
            if name == "sums" and any(one["verdict"] == "failed" for one in check.findings):
                print("gpu-check: stopped, since sums over the ranks are wrong")
                break
    return int(any(one["verdict"] == "failed" for one in check.findings))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in JOBS:
        report = json.dumps(JOBS[sys.argv[1]](*sys.argv[2:]))
        os.write(1, f"gpu-check: {report}\n".encode())  # in one piece: launchers mix the output of ranks
        os._exit(0)  # a broken Horovod may wait for ranks that are gone
    sys.exit(main())

"""Check the trainer on real GPUs: `make gpu-check`, or python -m
tests.gpu_check [--stages sums,speed].

Each check prints one line with its verdict, and all come as a table at the end. The JSON record of
--out is complete after each check. A wrong sum ends the run, since it makes all other results
meaningless. One GPU is enough: with NCCL 2.30 or newer up to four ranks share it. With `--hosts
FILE`, type it in a folder that all hosts of the host file have in the same place. Exit code 1: a
check failed. `--quick` takes small sizes and judges no speed: it tests this program.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks.turns import ROOT, about
from hvd_train.launch import hosts
from hvd_train.run_files.ledger import LEDGER, audit
from tests.support.launching import finished, json_lines, ranks_of, started, wait_for

SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
DIGITS = (
    "digits --epochs 1 --global-batch-size 480 --augment none --compression "
    "none --learning-rate 0.1"
)
# By name: ranks, flags, and the largest difference from the weights of fp32 on the CPU, over the
# distance of training.
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


class Check:
    """The machine, the folder for all output, and the findings so far."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.device = options.device
        self.quick = options.quick
        self.out = options.out and options.out.resolve()
        self.gpu = options.device == "cuda"
        self.folder = folder
        self.stage = ""
        gpus = torch.cuda.device_count()
        nccl = ctypes.c_int()
        if self.gpu and not gpus:
            sys.exit("gpu-check: torch sees no GPU; type `hvd-train doctor`")
        # torch reports the NCCL that it was compiled with
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(nccl))
        shares = gpus == 1 and nccl.value >= 23000
        self.hosts = options.hosts and options.hosts.resolve()
        self.most_ranks = (4 if shares else gpus) if self.gpu else 2
        if self.hosts:
            self.most_ranks = sum(host.slots for host in hosts.named(str(self.hosts)))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        self.variables = {"CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": path}
        self.variables |= SHARED_GPU if shares else {}
        names = [torch.cuda.get_device_name(number) for number in range(gpus)]
        self.record = {
            **about("tests.gpu_check"),
            "gpus": names,
            "nccl": nccl.value,
            "ranks": self.most_ranks,
        }
        self.findings: list[dict[str, Any]] = []

    def line(self, line: str, ranks: int) -> list[str]:
        """Return a command, under horovodrun if `ranks` is not 0."""
        hosts = ["-hostfile", str(self.hosts)] if self.hosts else []
        return [
            *(["horovodrun", "--gloo", "-np", str(ranks), *hosts] if ranks else []),
            *line.split(),
        ]

    def run(self, line: str, ranks: int = 0, code: int = 0, **variables: str) -> str:
        """Run a command to its end and return its output. Raises AssertionError."""
        found, output = finished(
            self.line(line, ranks), self.folder, 240, {**self.variables, **variables}
        )
        errors = (
            re.findall(r"\w*(?:Error|Exception|hvd-train): .*", output)
            or output.splitlines()
            or [""]
        )
        assert found == code, f"exit code {found}: {errors[-1][:300]}"
        return output

    def job(self, arguments: str, ranks: int, **variables: str) -> list[Any]:
        """Run one of JOBS and return the reports of its ranks."""
        output = self.run(f"{sys.executable} -m tests.gpu_check {arguments}", ranks, **variables)
        return [json.loads(text) for text in re.findall(r"gpu-check: (.*)$", output, re.MULTILINE)]

    def find(self, name: str, look: Callable[[], str]) -> None:
        """Make a check, record and print its verdict."""
        began = time.monotonic()
        try:
            verdict = "passed"
            what = look()
        except Exception as error:  # one broken check must not end the others
            verdict = "failed"
            what = f"{error}" if type(error) is AssertionError else f"{error!r}"
            if (output := self.folder / "output.txt").exists():
                output.rename(
                    self.folder / f"{re.sub('[^a-z0-9]+', '-', f'{self.stage} {name}')}.txt"
                )
        finding = {"stage": self.stage, "check": name, "verdict": verdict, "what": what}
        self.findings.append({**finding, "seconds": round(time.monotonic() - began, 1)})
        print(f"{self.stage}: {name}: {verdict}: {what}", flush=True)
        if self.out:
            self.out.write_text(
                json.dumps({**self.record, "findings": self.findings}, indent=1) + "\n"
            )


def doctor(check: Check) -> None:
    """Ask the doctor, which starts two ranks."""

    def look() -> str:
        report = json.loads(check.run("hvd-train doctor --json"))
        seen = [f"{one['name']}: {one['verdict']}: {one['what']}" for one in report["findings"]]
        check.record["doctor"] = seen
        assert report["ok"], report["verdict"]
        return report["verdict"]

    check.find("doctor", look)


def exact(check: Check, ranks: int, sizes: str, busy_s: int = 0, **variables: str) -> str:
    """Reduce groups of tensors whose sums every format holds exactly."""
    reports = check.job(f"sum {check.device} {busy_s} {sizes}", ranks, **variables)
    wrong = [name for report in reports for name in report["wrong"]]
    assert (len(reports), wrong) == (ranks, []), (
        f"{len(reports)} ranks reported {len(wrong)} wrong: {wrong[:1]}"
    )
    return f"{reports[0]['tried']} tensors in groups of fp16, fp32 and both: exact on every rank"


def sums(check: Check) -> None:
    """Reduce on several numbers of ranks, with and without Horovod's own kernels for copies."""
    sizes = "5 1003" if check.quick else "5 10007 3000017"
    for ranks in sorted({min(ranks, check.most_ranks) for ranks in (1, 2, 3, check.most_ranks)}):
        for batched in "10":
            look = partial(exact, check, ranks, sizes, HOROVOD_BATCH_D2D_MEMCOPIES=batched)
            check.find(f"{ranks} ranks, batched copies {batched}", look)


def weights_of(folder: Path) -> torch.Tensor:
    """Return the final weights of a run as one tensor."""
    state = torch.load(folder / "model-final.pt", map_location="cpu", weights_only=True)
    return torch.cat([state[name].double().flatten() for name in sorted(state)])


def equality(check: Check) -> None:
    """Train the digits for three steps in several ways, and compare the
    weights with fp32 on the CPU.
    """

    def trained(name: str, ranks: int, flags: str) -> torch.Tensor:
        folder = re.sub(r"\W+", "-", name)
        # By default cuDNN would convolve fp32 in TF32, whose significand has 10 bits.
        check.run(
            f"hvd-train train {DIGITS} {flags} --output-dir {folder}",
            ranks,
            NVIDIA_TF32_OVERRIDE="0",
        )
        return weights_of(check.folder / folder)

    cpu = trained("cpu", 0, "--device cpu")
    start = trained("start", 0, "--device cpu --learning-rate 1e-30 --weight-decay 0")

    def compare(name: str) -> str:
        ranks, flags, bound = WAYS[name]
        weights = trained(name, ranks, f"--device {check.device} {flags}")
        difference = float((weights - cpu).norm() / (start - cpu).norm())
        # NaN fails, too
        assert difference <= bound, f"difference {difference:.1e}, above {bound:.0e}"
        return f"difference {difference:.1e}, at most {bound:.0e}"

    for name, (ranks, _, _) in WAYS.items():
        # which a stand-in cannot do
        if ranks <= check.most_ranks and not (check.quick and "compile" in name):
            check.find(name, partial(compare, name))


def faults(check: Check) -> None:
    """Kill a rank of a static job, and keep the GPU busy before a sum for longer
    than a rank may be silent.
    """
    check.find("kill -9, and resume", partial(resumed, check))
    limits = {"HOROVOD_ELASTIC": "1", "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS": "5"}
    check.find(
        "busy GPU",
        partial(
            exact, check, min(2, check.most_ranks), "100003", 0 if check.quick else 8, **limits
        ),
    )


def elastic(check: Check) -> None:
    """Kill and stop ranks of an elastic job."""
    ranks = min(3, check.most_ranks)
    run = check.folder / "elastic"
    if ranks < 2:
        print("elastic: not run, it takes two ranks: two GPUs, or one and NCCL 2.30")
        return
    where = (
        ["--hosts", str(check.hosts)] if check.hosts else ["--discover", f"echo localhost:{ranks}"]
    )
    command = ["bash", f"{ROOT}/horovodrun_scripts/train_elastic.sh", *where, "--"]
    command += (
        f"digits --ledger --epochs 1000000 --eval-epochs 1000 --device {check.device} "
        "--output-dir elastic"
    ).split()
    with started(command, check.folder, check.folder / "elastic.log", check.variables) as job:

        def end() -> str:
            job.send_signal(signal.SIGTERM)
            code = job.wait(60)
            report = audit(run)
            assert code == 128 + signal.SIGTERM, f"exit code {code} after SIGTERM"
            assert not report.faults, f"{report.faults[0]}"
            return (
                f"{report.steps:,} steps in worlds of {report.world_sizes} ranks, every "
                "sample once per epoch"
            )

        check.find("first steps", lambda: f"after {_more_steps(run):.1f} s")
        for name, index in (("SIGKILL", 0), ("SIGKILL", -1), ("SIGSTOP", 0)):
            check.find(
                f"{name} of rank {index % ranks}",
                partial(strike, job, run, ranks, index, signal.Signals[name]),
            )
        # while the survivors, or all, connect again
        for delay in (0.3, 0.8, 1.5) if ranks > 2 else ():
            look = partial(strike, job, run, ranks, 0, signal.SIGKILL, again_after_s=delay)
            check.find(f"SIGKILL of rank 0, and of another {delay} s later", look)
        check.find("audit", end)


def resumed(check: Check) -> str:
    """Kill a rank of a training in mid epoch, resume it, and compare the weights with
    those of a whole training.
    """
    ranks = min(2, check.most_ranks)
    line = (
        f"hvd-train train digits --epochs 40 --commit-steps 5 --device {check.device} "
        "--deterministic --output-dir "
    )
    check.run(f"{line}whole", ranks)
    killed = check.folder / "killed"
    output = check.folder / "killed.txt"
    with started(check.line(f"{line}killed", ranks), check.folder, output, check.variables) as job:
        wait_for("a commit", lambda: list(killed.glob("**/step-*.ckpt")), 120)
        workers(job)[-1].kill()
        began = time.monotonic()
        code = job.wait(60)
    seconds = time.monotonic() - began
    assert code > 0, f"exit code {code}"
    check.run(f"{line}killed", ranks)
    whole = weights_of(check.folder / "whole")
    resumed = weights_of(killed)
    assert torch.equal(whole, resumed), (
        f"weights differ by {float((whole - resumed).abs().max()):.1e}"
    )
    return (
        f"the job ended after {seconds:.1f} s with exit code {code}; the same command "
        "ended with equal weights"
    )


def workers(job: "subprocess.Popen[bytes]") -> list[Any]:
    """Return the processes of this host that train, by their order of start."""
    return [
        one
        for one in ranks_of(job, "train")
        if any(word.endswith("/hvd-train") for word in one.cmdline()[:2])
    ]


def strike(
    job: "subprocess.Popen[bytes]",
    run: Path,
    ranks: int,
    index: int,
    number: int,
    again_after_s: float = 0,
) -> str:
    """Send a signal to a rank of an elastic job, and wait until the others train
    and until it is replaced.
    """

    def events() -> list[dict[str, Any]]:
        return [line for line in json_lines(run / "metrics.jsonl") if line.get("name") == "world"]

    first = len(events())
    there = workers(job)
    there[index].send_signal(number)
    before = first
    if again_after_s:
        time.sleep(again_after_s)
        there[index - 1].kill()
        before = len(events())
    survivors = _seconds_until("survivors", lambda: len(events()) > before)
    everyone = survivors + _seconds_until("all ranks", lambda: events()[-1]["world_size"] == ranks)
    _more_steps(run)
    assert not any(event["steps_lost"] for event in events()[first:]), "steps lost"
    return (
        f"survivors train after {survivors:.1f} s, all {ranks} after {everyone:.1f} s, no step lost"
    )


def _seconds_until(what: str, condition: Callable[[], object]) -> float:
    began = time.monotonic()
    wait_for(what, condition, 90)
    return time.monotonic() - began


def _more_steps(run: Path) -> float:
    ledger = run / LEDGER
    size = ledger.stat().st_size if ledger.exists() else 0
    return _seconds_until("steps", lambda: ledger.exists() and ledger.stat().st_size > size + 500)


def speed(check: Check) -> None:
    """Compare our step with bare loops on ResNet-50 with images of 224 pixels."""
    sizes = (
        "--image-size 32 --steps 3 --repetitions 2" if check.quick else "--steps 20 --repetitions 3"
    )
    line = (
        "hvd-train bench throughput imagenet-resnet50 --data synthetic --augment none "
        "--synthetic-samples 10000000"
    )
    line += f" {sizes} --device {check.device} --json throughput.json"
    seconds_of_ours: dict[tuple[str, int], float] = {}

    def compare(precision: str, ranks: int, peer: str) -> str:
        precision, batch = ("fp32", 8 // ranks) if check.quick else (precision, 208 // ranks)
        kind, _, compiled = peer.partition("+")
        launched = 0 if kind == "torch" else ranks
        if (precision + compiled, launched) not in seconds_of_ours:
            flags = (
                f"--batch-size {batch} --precision {precision}{' --compile' if compiled else ''}"
            )
            check.run(f"{line} {flags}", launched)
            measured = json.loads((check.folder / "throughput.json").read_text())
            seconds_of_ours[precision + compiled, launched] = measured["seconds_per_step"]
        ours = seconds_of_ours[precision + compiled, launched]
        other = max(
            check.job(
                f"bare {check.device} {peer} {batch} {precision} {int(check.quick)}", launched
            )
        )
        rate = f"{other / ours:.3f} of its images/s: {batch * ranks / ours:,.0f} images/s"
        seen = f"{rate}, {1000 * ours:.1f} and {1000 * other:.1f} ms a step"
        assert check.quick or other / ours >= AIM, f"{seen}, below {AIM}"
        return seen

    for precision, peer in product(("fp16", "bf16"), ("torch", "torch+compile")):
        check.find(f"{precision}, bare {peer}", partial(compare, precision, 1, peer))
    for ranks, peer in product(
        sorted({1, min(2, check.most_ranks), check.most_ranks}), ("ddp", "horovod")
    ):
        check.find(f"fp16, {ranks} ranks, bare {peer}", partial(compare, "fp16", ranks, peer))


def sum_job(device: str, busy_s: str, *sizes: str) -> dict[str, Any]:
    """Return the number of tensors that were reduced in groups, and the names of wrong results.

    The GPU is busy for `busy_s` seconds before the second group; the first forms the communicators.
    """
    hvd.init()
    n = hvd.size()
    tried = 0
    wrong = list[str]()
    # fp16 holds all these sums exactly, and averages if the division is exact.
    operations = {
        hvd.Sum: n * (n + 1) / 2,
        **({hvd.Average: (n + 1) / 2} if n & (n - 1) == 0 else {}),
    }
    for size in map(int, sizes):
        for kinds in ([torch.float16], [torch.float32], [torch.float16, torch.float32]):
            for operation, factor in operations.items():
                parts = [((torch.arange(size) + k) % 3, kind) for kind in kinds for k in range(5)]
                group = [(part * (hvd.rank() + 1)).to(kind).to(device) for part, kind in parts]
                if tried == 5 and device == "cuda" and busy_s != "0":
                    # cycles, 2 GHz at most
                    torch.cuda._sleep(int(2.0e9 * float(busy_s)))  # type: ignore[no-untyped-call]
                name = f"{size} of {kinds}, operation {operation}"
                outputs = hvd.grouped_allreduce(group, name=name, op=operation)
                tried += len(parts)
                for output, (part, kind) in zip(outputs, parts, strict=True):
                    wrong += [] if torch.equal(output.cpu(), (part * factor).to(kind)) else [name]
    hvd.shutdown()
    return {"tried": tried, "wrong": wrong}


def bare_job(device: str, peer: str, batch: str, precision: str, quick: str) -> float:
    """Return the median seconds of a step of ResNet-50 in a bare loop: `torch`,
    `horovod`, `ddp` or NAME+compile.
    """
    from torchvision import models

    torch.backends.cudnn.benchmark = True
    kind, _, compiled = peer.partition("+")
    gpu = device == "cuda"
    horovod = kind == "horovod"
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}
    size, steps = (32, 3) if quick == "1" else (224, 20)
    if kind != "torch":
        hvd.init()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
        if gpu:
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    # Horovod refuses gradients that are not contiguous; cuDNN still computes in channels_last for
    # such images.
    layout = torch.contiguous_format if horovod else torch.channels_last
    model: Any = models.resnet50().to(device, memory_format=layout)
    images = torch.randn(int(batch), 3, size, size, device=device).contiguous(
        memory_format=torch.channels_last
    )
    labels = torch.randint(0, 1000, (int(batch),), device=device)
    options: dict[str, Any] = {"lr": 1e-6, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    optimizer: Any = torch.optim.SGD(model.parameters(), fused=not horovod, **options)
    scaler: Any = torch.amp.GradScaler(device, enabled=precision == "fp16")
    if horovod:
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=hvd.Compression.fp16
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if kind == "ddp":
        options = {"world_size": hvd.size(), "wait_for_workers": False}
        store = (
            torch.distributed.TCPStore(socket.gethostname(), 0, is_master=True, **options)
            if hvd.rank() == 0
            else None
        )
        host, port = hvd.broadcast_object(store and (store.host, store.port), name="store")
        store = store or torch.distributed.TCPStore(host, port, **options)
        world = {"store": store, "rank": hvd.rank(), "world_size": hvd.size()}
        torch.distributed.init_process_group("nccl" if gpu else "gloo", **world)
        model = torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True
        )
    if compiled:
        model = torch.compile(model)
    times = []
    for step in range(4 * steps + 1):
        if step % steps == 0:
            if gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter())
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype.get(precision), enabled=precision in dtype):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        if horovod:
            optimizer.synchronize()
        with optimizer.skip_synchronize() if horovod else contextlib.nullcontext():
            scaler.step(optimizer)
        scaler.update()
    return statistics.median(after - before for before, after in pairwise(times[1:])) / steps


JOBS: dict[str, Callable[..., Any]] = {"sum": sum_job, "bare": bare_job}  # what ranks run
STAGES = {stage.__name__: stage for stage in (doctor, sums, equality, faults, elastic, speed)}


def main() -> int:
    """Run the stages and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stages", default=",".join(STAGES), help=f"some of {','.join(STAGES)} (default: all)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--hosts", type=Path, help="a host file: check the GPUs of all its slots")
    parser.add_argument("--out", type=Path, help="the file for the record")
    parser.add_argument("--quick", action="store_true", help="small sizes, to test this program")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-", dir=Path.cwd() if options.hosts else None))
    check = Check(options, folder)
    for check.stage in options.stages.split(","):
        check.find("whole stage", lambda: f"{STAGES[check.stage](check) or 'done'}")
        if check.stage == "sums" and any(one["verdict"] == "failed" for one in check.findings):
            print("gpu-check: stopped, since sums over the ranks are wrong")
            break
    failed = [one for one in check.findings if one["verdict"] == "failed"]
    width = max(len(one["check"]) for one in check.findings)
    print(
        f"\n{', '.join(check.record['gpus']) or 'CPU'}, NCCL {check.record['nccl']}: "
        f"{len(failed)} checks failed"
    )
    for one in check.findings:
        print(f"{one['verdict']}  {one['stage']:8}  {one['check']:{width}}  {one['what']}")
    if failed:
        print(f"the output of what failed is in {folder}")
    else:
        shutil.rmtree(folder)
    return int(bool(failed))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in JOBS:
        report = json.dumps(JOBS[sys.argv[1]](*sys.argv[2:]))
        # in one piece: launchers mix the output of ranks
        os.write(1, f"gpu-check: {report}\n".encode())
        os._exit(0)  # a broken Horovod may wait for ranks that are gone
    sys.exit(main())

"""Check the trainer on real GPUs: `make gpu-check`, or python -m
tests.gpu_check [--stages sums,fp16] [--out FILE].

Each check prints one line with its verdict, the last lines count and name the failures. A stage
takes less than three minutes. The JSON file of --out is complete after each check; what it holds of
other checks stays. `--missing` names the stages of which the project's record has no row for
today's code. A wrong sum ends the run, since it makes all other results meaningless. One GPU is
enough: with NCCL 2.30 or newer up to four ranks share it. With `--hosts FILE`, type it in a folder
that all hosts of the host file have in the same place. Exit code 1: a check failed. `--quick` takes
small sizes and judges no speed: it tests this program.
"""

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks.turns import ROOT, about
from hvd_train.bench import throughput
from hvd_train.launch import hosts
from hvd_train.network.digest import hashes_of
from hvd_train.recipes import RECIPES
from hvd_train.run_files.ledger import LEDGER, audit
from hvd_train.world.world import LocalWorld
from tests.support import jpegs
from tests.support.launching import HVD_TRAIN, finished, json_lines, ranks_of, started, wait_for

SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
DIGITS = (
    "digits --epochs 1 --global-batch-size 480 --augment none --compression "
    "none --learning-rate 0.1"
)
# By name: ranks, flags, and the largest difference from the weights of fp32 on the CPU, over the
# distance of training.
WAYS = {
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
    "2 ranks, balance": (2, "--batch-size 8 --balance on", 1e-4),
}
# the least speed of our step, over that of a bare loop
AIMS = {"torch": 0.97, "ddp": 1.0, "horovod": 1.0}
RECORD = ROOT / "benchmarks" / "records" / "gpu-check.json"


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
        facts = {"gpus": names, "nccl": nccl.value, "ranks": self.most_ranks}
        self.record = {**about("tests.gpu_check"), **facts, "code": digest_of_code()}
        self.findings = []

    def line(self, line: str, ranks: int) -> list[str]:
        """Return a command, under horovodrun if `ranks` is not 0."""
        hosts = ["-hostfile", str(self.hosts)] if self.hosts else []
        start = ["horovodrun", "--gloo", "-np", str(ranks), *hosts] if ranks else []
        return [*start, *line.split()]

    def run(self, line: str, ranks: int = 0, code: int = 0, **variables: str) -> str:
        """Run a command to its end and return its output. Raises AssertionError."""
        found, output = finished(
            self.line(line, ranks), self.folder, 240, {**self.variables, **variables}
        )
        errors = re.findall(r"\w*(?:Error|Exception|hvd-train): .*", output) or [output[-300:]]
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
        finding["seconds"] = round(time.monotonic() - began, 1)
        of_code = {key: self.record[key] for key in ("commit", "code", "date")}
        self.findings.append(finding | of_code)
        print(f"{self.stage}: {name}: {verdict}: {what}", flush=True)
        if self.out:
            mine = {(one["stage"], one["check"]) for one in self.findings}
            others = [one for one in rows_of(self.out) if (one["stage"], one["check"]) not in mine]
            whole = {**self.record, "findings": [*others, *self.findings]}
            self.out.write_text(json.dumps(whole, indent=1) + "\n")


def rows_of(record: Path) -> list[dict[str, Any]]:
    """Return the findings in a record; none, if there is no file."""
    return json.loads(record.read_text())["findings"] if record.exists() else []


def digest_of_code() -> str:
    """Return a digest of the trainer and of the patches of Horovod. It needs no git."""
    digest = hashlib.sha256()
    patches = ROOT / "packaging" / "patches"
    for path in sorted([*(ROOT / "hvd_train").rglob("*.py"), *patches.rglob("*.*")]):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def missing(record: Path) -> list[str]:
    """Return a line for each stage of which a record has no row for today's code: its commits."""
    lines = []
    code = digest_of_code()
    for stage in STAGES:
        rows = [one for one in rows_of(record) if one["stage"] == stage]
        if code not in [one.get("code") for one in rows]:
            commits = dict.fromkeys(one["commit"] or "unknown commit" for one in rows)
            lines.append(f"{stage}: {', '.join(commits) or 'never run'}")
    return lines


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


def equality(check: Check, *, several: bool) -> None:
    """Train the digits for three steps in several ways, on one rank or on `several`, and compare
    the weights with fp32 on the CPU.
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

    on_cpu = "--device cpu --channels-last off"  # as in fp32 on a GPU
    cpu = trained("cpu", 0, on_cpu)
    start = trained("start", 0, f"{on_cpu} --learning-rate 1e-30 --weight-decay 0")

    def compare(name: str) -> str:
        ranks, flags, bound = WAYS[name]
        weights = trained(name, ranks, f"--device {check.device} {flags}")
        difference = float((weights - cpu).norm() / (start - cpu).norm())
        # NaN fails, too
        assert difference <= bound, f"difference {difference:.1e}, above {bound:.0e}"
        return f"difference {difference:.1e}, at most {bound:.0e}"

    for name, (ranks, _, _) in WAYS.items():
        # a stand-in cannot compile
        can = ranks <= check.most_ranks and not (check.quick and "compile" in name)
        if can and several == (ranks > 0):
            check.find(name, partial(compare, name))


def bits(check: Check) -> None:
    """Train with exact sums on one rank and on several: their weights are equal to the bit. Hash
    a state.
    """

    def look(ranks: int) -> str:
        found = []
        for number in (1, ranks):
            folder = f"exact-{number}"
            flags = f"--reduction exact --device {check.device}"
            check.run(f"hvd-train train {DIGITS} {flags} --output-dir {folder}", number)
            found.append(weights_of(check.folder / folder))
            shutil.rmtree(check.folder / folder)
        assert torch.equal(*found), f"difference {float((found[0] - found[1]).abs().max()):.1e}"
        return "equal"

    for ranks in range(2, min(3, check.most_ranks) + 1):
        check.find(f"exact sums on {ranks} ranks", partial(look, ranks))

    def digest() -> str:
        megabytes = 64 if check.quick else 2048
        [report] = check.job(f"digest {check.device} {megabytes}", 0)
        assert report["equal"], "the hashes of a tensor are others than on the CPU"
        return f"a state of {megabytes} MB: {report['seconds']:.3f} s"

    check.find("digest of a state", digest)


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


def workers(job: Any) -> list[Any]:
    """Return the processes of this host that train, by their order of start."""
    return [one for one in ranks_of(job, "train") if HVD_TRAIN in one.cmdline()[:2]]


def strike(
    job: Any,
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


def speed(check: Check, precision: str, *peers: tuple[str, int]) -> None:
    """Compare our step with bare loops on ResNet-50 with images of 224 pixels: once with a batch
    that is ready, and once with bytes on the device, of which each step makes a batch.

    `peers` are kinds of `bare_job` and ranks.
    """

    def compare(peer: str, ranks: int, given: str) -> str:
        kind, _, compiled = peer.partition("+")
        launched = 0 if kind == "torch" else ranks
        batch = 8 // ranks if check.quick else 208 // ranks
        its_precision = "fp32" if check.quick else precision
        sizes = f"{batch} {its_precision} {given} {int(check.quick)}"

        def worst(job: str) -> tuple[float, ...]:
            of_ranks = check.job(f"{job} {check.device} {sizes}", launched)
            return tuple(max(numbers) for numbers in zip(*of_ranks, strict=True))

        ours, peak = worst(f"ours{'+compile' if compiled else ''}")
        other, its_peak = worst(peer)
        rate = f"{other / ours:.3f} of its images/s: {batch * ranks / ours:,.0f} images/s"
        seen = f"{rate}, {1000 * ours:.1f} and {1000 * other:.1f} ms a step"
        seen += f", peaks {peak:.1f} and {its_peak:.1f} GiB a rank"
        assert check.quick or other / ours >= AIMS[kind], f"{seen}, below {AIMS[kind]}"
        return seen

    for (peer, ranks), given in itertools.product(peers, ("ready", "bytes")):
        if ranks <= check.most_ranks and not (check.quick and "compile" in peer):
            check.find(
                f"{precision}, {ranks} ranks, bare {peer}, {given}",
                partial(compare, peer, ranks, given),
            )


def images(check: Check) -> None:
    """Train ResNet-50 from image files, as fast as processes decode them."""
    side = 32 if check.quick else 224
    sizes = "--steps 20 --batch-size 208 --precision fp16"
    if check.quick:
        sizes = "--steps 2 --batch-size 8 --precision fp32"
    cores = len(os.sched_getaffinity(0))
    picture = jpegs.encoded(jpegs.noise(500, 375), quality=80)
    for number in range(64 if check.quick else 4096):
        part = "train" if number % 8 > 1 else "val"
        folder = check.folder / "images" / part / f"{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(picture)

    def look() -> str:
        check.run(
            "hvd-train bench throughput imagenet-resnet50 --data folder --data-dir images "
            f"--image-size {side} --workers {cores} --device {check.device} --json images.json "
            f"--repetitions 2 {sizes}"
        )
        measured = json.loads((check.folder / "images.json").read_text())
        return (
            f"{measured['samples_per_second']:,.0f} images/s, waits for data "
            f"{measured['split']['data'] / measured['seconds_per_step']:.0%} of a step"
        )

    check.find(f"{cores} processes", look)


def programs(check: Check) -> None:
    """Run a program with two optimizers, and the commands for a finished run."""
    jpegs.digits(check.folder / "pictures", range(2), most=32)
    device = f"--device {check.device}"
    lines = {
        "a session with two optimizers": f"{sys.executable} {ROOT}/examples/dcgan.py --width 16 "
        f"--epochs 1 --batch-size 16 {device} --data-dir pictures/train --output-dir dcgan",
        "train": f"hvd-train train {DIGITS} {device} --output-dir digits",
        "evaluate": f"hvd-train evaluate digits {device}",
        "export": "hvd-train export digits",
        "bench scaling": "hvd-train bench scaling digits --np "
        f"1,{min(2, check.most_ranks)} --epochs 2 {device}",
    }

    def look(line: str) -> str:
        check.run(line)
        return "exit code 0"

    for name, line in lines.items():
        check.find(name, partial(look, line))


def sum_job(device: str, busy_s: str, *sizes: str) -> dict[str, Any]:
    """Return the number of tensors that were reduced in groups, and the names of wrong results.

    The GPU is busy for `busy_s` seconds before the second group; the first forms the communicators.
    """
    hvd.init()
    n = hvd.size()
    tried = 0
    wrong = []
    # fp16 holds all these sums exactly, and averages if the division is exact.
    operations = {hvd.Sum: n * (n + 1) / 2}
    if n & (n - 1) == 0:
        operations[hvd.Average] = (n + 1) / 2
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


def digest_job(device: str, megabytes: str) -> dict[str, Any]:
    """Return the seconds that a device takes to hash so many MB, and whether the hashes are those
    of the CPU.
    """
    values = torch.arange(int(megabytes) << 18, dtype=torch.int32).to(device)
    equal = hashes_of([values[: 1 << 24]]) == hashes_of([values[: 1 << 24].cpu()])
    began = time.perf_counter()
    hashes_of([values])
    return {"equal": equal, "seconds": time.perf_counter() - began}


def ours_job(
    device: str, batch: str, precision: str, given: str, quick: str, *, compiled: bool
) -> tuple[float, float]:
    """Return what `bare_job` does, of our step."""
    from hvd_train.world.horovod_world import HorovodWorld

    world = HorovodWorld() if "HOROVOD_RANK" in os.environ else LocalWorld()
    size, steps = SIZES[quick]
    config = RECIPES["imagenet-resnet50"]().replace(
        device=device,
        image_size=size,
        batch_size=int(batch),
        precision=precision,
        augment="none",
        compile=compiled,
    )
    config = throughput.without_files(config, own_data=False)
    with closing(throughput.Stepper(config, world)) as stepper:
        if given == "ready":
            stepper.repeat_batch()
        return timed(device, steps, lambda: stepper.take(1))


def timed(device: str, steps: int, take: Callable[[], object]) -> tuple[float, float]:
    """Return the median seconds of a step in three times so many after as many to warm up, and the
    peak of the GPU's memory in GiB.
    """
    times = []
    for step in range(4 * steps + 1):
        if step % steps == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())
        take()
    seconds = statistics.median(after - before for before, after in pairwise(times[1:])) / steps
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def batches(device: str, batch: int, size: int, given: str) -> Iterator[torch.Tensor]:
    """Yield images [batch, 3, size, size] float32 in channels_last: the same ones, or those that
    an expert makes of bytes.
    """
    channels_last = torch.channels_last
    if given == "ready":
        images = torch.randn(batch, 3, size, size, device=device)
        yield from itertools.repeat(images.contiguous(memory_format=channels_last))
    data = torch.randint(256, (4 * batch, 3, size, size), dtype=torch.uint8, device=device)
    mean, std = (
        torch.tensor(values, device=device).view(3, 1, 1)
        for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    while True:
        rows = torch.randint(len(data), (batch,), device=device)
        images = data[rows].to(torch.float32, memory_format=channels_last)
        yield images.div_(255).sub_(mean).div_(std)


def bare_job(
    device: str, batch: str, precision: str, given: str, quick: str, *, peer: str
) -> tuple[float, float]:
    """Return the median seconds of a step of ResNet-50 in a bare loop, and the peak of the GPU's
    memory in GiB. The peer is `torch`, `horovod`, `ddp` or NAME+compile.
    """
    from torchvision import models

    torch.backends.cudnn.benchmark = True
    kind, _, compiled = peer.partition("+")
    gpu = device == "cuda"
    horovod = kind == "horovod"
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}
    size, steps = SIZES[quick]
    if kind != "torch":
        hvd.init()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
        if gpu:
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    # Horovod refuses gradients that are not contiguous; cuDNN still computes in channels_last for
    # such images.
    layout = torch.contiguous_format if horovod else torch.channels_last
    model = models.resnet50().to(device, memory_format=layout)
    inputs = batches(device, int(batch), size, given)
    labels = torch.randint(0, 1000, (int(batch),), device=device)
    options = {"lr": 1e-6, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    optimizer = torch.optim.SGD(model.parameters(), fused=not horovod, **options)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    if horovod:
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), hvd.Compression.fp16
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if kind == "ddp":
        with socket.create_server(("", 0)) as server:  # a free port, on rank 0
            place = f"tcp://{socket.gethostname()}:{server.getsockname()[1]}"
        torch.distributed.init_process_group(
            "nccl" if gpu else "gloo",
            init_method=hvd.broadcast_object(place),
            rank=hvd.rank(),
            world_size=hvd.size(),
        )
        model = torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True
        )
    if compiled:
        model = torch.compile(model)

    def take() -> None:
        images = next(inputs)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype.get(precision), enabled=precision in dtype):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        if horovod:
            optimizer.synchronize()
        with optimizer.skip_synchronize() if horovod else contextlib.nullcontext():
            scaler.step(optimizer)
        scaler.update()

    return timed(device, steps, take)


SIZES = {"1": (32, 3), "0": (224, 20)}  # pixels, steps; by `quick`
PEERS = ("torch", "torch+compile", "ddp", "horovod")
JOBS = {  # what ranks run
    "sum": sum_job,
    "digest": digest_job,
    "ours": partial(ours_job, compiled=False),
    "ours+compile": partial(ours_job, compiled=True),
    **{peer: partial(bare_job, peer=peer) for peer in PEERS},
}
STAGES = {
    "doctor": doctor,
    "sums": sums,
    "equality": partial(equality, several=False),
    "equality-of-ranks": partial(equality, several=True),
    "bits": bits,
    "faults": faults,
    "elastic": elastic,
    "fp16": lambda check: speed(check, "fp16", ("torch", 1)),
    "bf16": lambda check: speed(check, "bf16", ("torch", 1)),
    "compiled": lambda check: speed(check, "fp16", ("torch+compile", 1)),
    "ddp": lambda check: speed(check, "fp16", ("ddp", 2)),
    "horovod": lambda check: speed(check, "fp16", ("horovod", 2)),
    "images": images,
    "programs": programs,
}


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
    parser.add_argument("--missing", action="store_true", help="name the stages to run")
    parser.add_argument("--quick", action="store_true", help="small sizes, to test this program")
    options = parser.parse_args()
    if options.missing:
        print("\n".join(missing(options.out or RECORD)))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-", dir=Path.cwd() if options.hosts else None))
    check = Check(options, folder)
    for check.stage in options.stages.split(","):
        check.find("whole stage", lambda: f"{STAGES[check.stage](check) or 'done'}")
        if check.stage == "sums" and any(one["verdict"] == "failed" for one in check.findings):
            print("gpu-check: stopped, since sums over the ranks are wrong")
            break
    failed = [one["check"] for one in check.findings if one["verdict"] == "failed"]
    print(f"{check.record['gpus'] or 'CPU'}, NCCL {check.record['nccl']}: {len(failed)} failed")
    if failed:
        print(f"{', '.join(failed)}; their output is in {folder}")
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

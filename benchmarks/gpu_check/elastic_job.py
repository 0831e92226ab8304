"""A running elastic job: what it has done so far, its workers on this host, and faults that they are given."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from benchmarks.gpu_check.findings import Failed, Seen
from benchmarks.gpu_check.site import Site
from hvd_train.doctor.children import Child
from hvd_train.run_files.ledger import LEDGER, audit
from hvd_train.run_files.run_folder import METRICS

NAME = "elastic"
LIMIT_S = 120.0
GPU_MEMORY = "import torch; print([torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count())])"


class ElasticJob:
    """`train_elastic.sh` with the digits on so many ranks, without an end."""

    def __init__(self, site: Site, script: str, ranks: int) -> None:
        host = ["--hosts", str(site.machine.host_file)] if site.machine.host_file else ["--discover"]
        host += [] if site.machine.host_file else [f"echo localhost:{ranks}"]
        line = [script, *host, "-np", str(ranks), "--", "digits", "--device", "cuda", "--epochs", "1000000"]
        line += ["--eval-epochs", "1000", "--log-steps", "100", "--ledger", "--output-dir", NAME]
        self.site, self.ranks, self.run = site, ranks, site.folder / NAME
        self.child: Child = site.start(line, 60 * site.minutes, {})
        self.witness: psutil.Process | None = None
        """A worker that no fault is given: what it keeps of each world that has broken would be seen in the end."""

    # ----------------------------------------------------------------------------------------------- what it has done

    def events(self) -> list[dict[str, Any]]:
        """Return the changes of world so far."""
        path = self.run / METRICS
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if '"name": "world"' in line and line.endswith("\n")]

    def steps_on_disk(self) -> int:
        """Return a number that grows with the steps: the bytes of the ledger."""
        path = self.run / LEDGER
        return path.stat().st_size if path.exists() else 0

    def wait_for(self, what: str, condition: Callable[[], object]) -> float:
        """Wait until `condition` holds and return the seconds. Raises Failed at the job's end, and after a while."""
        began, limit_s = time.monotonic(), min(LIMIT_S, self.site.seconds_left())
        while not condition():
            assert self.child.process is not None
            if (code := self.child.process.poll()) is not None:
                raise Failed(f"the job ended with exit code {code}, before {what}")
            if time.monotonic() - began > limit_s:
                raise Failed(f"waited {time.monotonic() - began:.0f} s for {what}")
            time.sleep(0.05)
        return time.monotonic() - began

    def train_on(self) -> float:
        """Wait until some more steps are on disk."""
        before = self.steps_on_disk()
        return self.wait_for("more steps", lambda: self.steps_on_disk() > before + 1000)

    # -------------------------------------------------------------------------------------------------------- workers

    def workers(self) -> list[psutil.Process]:
        """Return the workers on this host."""
        assert self.child.process is not None
        found = []
        for process in psutil.Process(self.child.process.pid).children(recursive=True):
            try:
                arguments = process.cmdline()
            except psutil.Error:  # it has ended meanwhile
                continue
            if "train" in arguments and any(argument.endswith("/hvd-train") for argument in arguments[:2]):
                found.append(process)
        return found

    def rank_0(self) -> psutil.Process:
        """Return the worker that writes the files of the run. Raises Failed where it is not on this host."""
        for process in self.workers():
            try:
                if any(file.path == str(self.run / METRICS) for file in process.open_files()):
                    return process
            except psutil.Error:
                continue
        raise Failed("no worker on this host has the files of the run open")

    def another(self, *, but_rank_0: bool = True) -> psutil.Process:
        """Return the oldest worker that is not the witness, nor rank 0 if there is another.

        The driver lets a slot wait twice as long after each worker that died young, so the slots have to take turns.
        """
        left = [worker for worker in self.workers() if worker != self.witness]
        others = [worker for worker in left if not but_rank_0 or worker != self.rank_0()]
        return min(others or left, key=psutil.Process.create_time)

    # --------------------------------------------------------------------------------------------------------- faults

    def strike(self, victim: psutil.Process, number: signal.Signals) -> Seen:
        """Send a signal to a worker, and wait until the others and then a newcomer in its place train together."""
        if self.witness is None:
            self.witness = next((worker for worker in self.workers() if worker not in (victim, self.rank_0())), None)
        before = len(self.events())
        victim.send_signal(number)
        survived = self.wait_for("the survivors", lambda: len(self.events()) > before)
        whole = survived + self.wait_for("a newcomer", lambda: self.events()[-1]["world_size"] == self.ranks)
        self.train_on()
        changes = self.events()[before:]
        lost = sum(int(change["steps_lost"]) for change in changes)
        figures = {"survivors_s": round(survived, 2), "all_s": round(whole, 2), "steps_lost": lost}
        if lost:
            raise Failed(f"{lost} steps lost", **figures)
        return f"survivors after {survived:.1f} s, {self.ranks} ranks after {whole:.1f} s, no step lost", figures

    def gpu_memory(self) -> int:
        """Return the bytes in use on all GPUs of this host, by all processes."""
        answer = json.loads(self.site.run("gpu-memory", [sys.executable, "-c", GPU_MEMORY]).translate({40: 91, 41: 93}))
        return sum(total - free for free, total in answer)

    def end(self) -> Seen:
        """Tell the job to end, and audit what it has done: each sample of an epoch counts once."""
        assert self.child.process is not None
        self.child.process.send_signal(signal.SIGTERM)
        self.child.timeout_s = time.monotonic() - self.child.started + 60
        outcome = self.child.outcome()
        (self.site.folder / f"{NAME}.log").write_text(outcome.output, encoding="utf-8")
        if outcome.code != 128 + signal.SIGTERM:
            raise Failed(f"exit code {outcome.code} after SIGTERM, not {128 + signal.SIGTERM}")
        report = audit(self.run)
        if report.faults:
            raise Failed(f"the audit found {len(report.faults)} faults: {report.faults[0]}")
        return f"exact, in worlds of {', '.join(map(str, report.world_sizes))} ranks", {}

"""The `World` of an elastic job: workers form one world after another, and send
heartbeats to the driver.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from hvd_train.errors import RankLost, UsageError
from hvd_train.launch import client, interfaces, workers
from hvd_train.launch.heartbeat import Heartbeat
from hvd_train.launch.workers import JOB, REPLACES, RUN_DIR, SLOT, WORKER, Request
from hvd_train.world import horovod_world
from hvd_train.world.world import Place

T = TypeVar("T")

_RETRY_S = 1.0
_ANSWER_S = 2.0
_PREDECESSOR_S = 5.0  # for the earlier worker of this slot to end by itself; it may write a commit


def wait_for_first_rank(environ: MutableMapping[str, str], facts: Mapping[str, str]) -> None:
    """Wait for a rank, and set the variables that Horovod's core reads.

    Raises: UsageError: if `facts` differ from the job's; OSError: if the driver cannot be reached;
    SystemExit (0): if there is no rank for this worker.
    """
    text = json.dumps({"who": environ["HOROVOD_HOSTNAME"], **facts})
    if difference := client.get(environ, f"problem/{environ[WORKER]}", text=text):
        raise UsageError(difference)
    values = client.get(
        environ, f"rank_and_size/{environ['HOROVOD_HOSTNAME']}:{environ[WORKER]}"
    ).split(",")
    if values[0] == "-1":
        raise SystemExit(0)
    environ.update(workers.rank_variables(values))


class ElasticWorld(horovod_world.HorovodWorld):
    """The ranks of an elastic job, as they come and go.

    The rendezvous is in `meet`; before it each rank imports and builds alone, so that no other rank
    waits for it. Until then only the local rank in `place` counts, which decides the GPU.
    """

    def __init__(self, facts: Mapping[str, str] | None = None) -> None:
        self._has_had_rank = False
        self._steps = 0  # before the last fault
        self._connect_error = ""  # why the state is not synchronized yet in this world
        if REPLACES in os.environ:
            workers.kill(os.environ[REPLACES], os.environ[JOB], _PREDECESSOR_S)
        self._heartbeat = Heartbeat()
        super().__init__(facts=facts)

    @override
    def _connect(self) -> None:
        self.place = Place(
            local_rank=int(os.environ[SLOT]),
            local_size=int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")),
        )

    @override
    def prepare(self, build: Callable[[], T]) -> T:
        return build()

    @override
    def compare(self, facts: Mapping[str, str], what: str = "its start") -> None:
        if len(self.program.begun) <= 1:  # a newcomer's first training is that of the others
            self._facts = {**self._facts, **facts}

    @override
    def join(self, sync: Callable[[], None] = lambda: None) -> None:
        self._heartbeat.report("train")
        if not self._has_had_rank:
            self.meet(sync)
            return
        try:
            sync()
        except RankLost as error:
            self.meet(sync, error)

    @property
    @override
    def joins_folder(self) -> Path | None:
        folder = os.environ.get(RUN_DIR)
        return Path(folder) if folder and not self._has_had_rank else None

    @override
    def meet(self, sync: Callable[[], None] = lambda: None, after: RankLost | None = None) -> None:
        def synchronize() -> None:
            try:
                sync()
            except RankLost as error:
                self._connect_error = str(error)
                raise
            self._connect_error = ""

        if after is not None:
            self._steps = after.step
        self._join()
        horovod_world.meet(synchronize, self._join)

    @override
    def leave(self, *, failed: bool) -> None:
        if failed:
            horovod_world.stop()
        self._heartbeat.report("write")

    @override
    def requested(self, *, got_signal: bool = False) -> Request:
        if got_signal:
            self._heartbeat.report("signal")
        return self._heartbeat.requested

    def _join(self) -> None:
        """Leave the last world, if any, and form one with the other ranks, which sets `place`.

        Raises: RankLost: if they or the driver cannot be reached; UsageError: if the facts of this
        worker differ from the others; SystemExit: if the job continues without this worker.
        """
        while True:
            try:
                if self._has_had_rank:
                    horovod_world.stop()
                    left = json.dumps([self._steps, self._connect_error])
                    client.put(os.environ, f"left/{os.environ[WORKER]}", left, _ANSWER_S)
                    # Horovod's core asks for a rank with it
                    os.environ["HOROVOD_LOCAL_RANK"] = os.environ[WORKER]
                else:
                    wait_for_first_rank(os.environ, self._facts)
                    self._has_had_rank = True
                elsewhere = client.get(os.environ, f"elsewhere/{os.environ[WORKER]}", _ANSWER_S)
                interfaces.choose(os.environ, elsewhere)
                self.allow_wait(0.0)  # unless the data allow more
                place = horovod_world.start()
                break
            except (ValueError, OSError) as error:
                if self._heartbeat.driver_gone:
                    raise RankLost(f"cannot connect to the other ranks: {error}") from error
                if isinstance(error, OSError):
                    time.sleep(_RETRY_S)
                else:  # Horovod's, which refers to its log, which is off
                    self._connect_error = str(error).partition(". Please check")[0]
        self._heartbeat.world_formed()
        if self._reducer is not None:
            self._reducer.leave_world()
        self.place = replace(place, local_rank=self.place.local_rank)  # keep the chosen GPU

"""The `World` of an elastic job: workers form one world after another."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TypeVar

from typing_extensions import override

from hvd_train.errors import RankLost
from hvd_train.launch import client, launcher
from hvd_train.world import heartbeat, horovod_world
from hvd_train.world.world import DriverLost, Place, Request, already_in_sync

T = TypeVar("T")

_DRIVER_CHECK_S = 0.5
_ATTEMPTS = 5  # to reach the driver, which decides how often ranks try to connect


class ElasticWorld(horovod_world.HorovodWorld):
    """The ranks of an elastic job, as they come and go.

    The rendezvous is in `run`; before it each rank imports and builds alone, so that no other rank waits for it. Until
    then only the local rank in `place` counts, which decides the GPU.
    """

    def __init__(self, facts: Mapping[str, str] | None = None) -> None:
        self._has_had_rank = self._core_hangs = False
        self._connect_error = ""  # why the state is not synchronized yet in this world
        launcher.kill_predecessor(os.environ)
        client.find_driver(os.environ)
        self._heartbeat = heartbeat.Heartbeat()
        self._heartbeat.start(os.environ)
        super().__init__(facts=facts)

    @override
    def _connect(self) -> Place:
        return Place(local_rank=launcher.slot(os.environ), local_size=int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")))

    @override
    def prepare(self, build: Callable[[], T]) -> T:
        return build()

    @override
    def compare(self, facts: Mapping[str, str]) -> None:
        self._facts = {**self._facts, **facts}

    @override
    def run(self, body: Callable[[], T], sync: Callable[[], None] = already_in_sync) -> T:
        def synchronize() -> None:
            try:
                sync()
            except RankLost as error:
                self._connect_error = str(error)
                raise
            self._connect_error = ""

        state = horovod_world.ElasticState(synchronize, self._forget_step)
        try:
            self._join()
            return horovod_world.run_elastic(state, body, self._join_again)
        except Exception:
            if not self._core_hangs:
                horovod_world.stop()  # at once, so that the others do not wait for this rank
            raise
        finally:
            self._heartbeat.training_left()

    @override
    def requested(self, *, got_signal: bool = False) -> Request:
        if got_signal:
            self._heartbeat.signal_received()
        return self._heartbeat.requested

    @override
    def close(self) -> None:
        self._heartbeat.all_written()
        if not self._core_hangs:
            super().close()

    def _forget_step(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.forget_step()

    def _join_again(self) -> None:
        horovod_world.stop()
        self._join()

    def _join(self) -> None:
        """Form a world with the other ranks, which sets `place`.

        Raises: RankLost: if they cannot be reached; DriverLost: if the driver cannot be reached; UsageError: if the
        facts of this worker differ from the others; SystemExit: if the job continues without this worker.
        """
        attempts = 0
        while True:
            try:
                if self._has_had_rank:
                    heartbeat.announce_rejoining(os.environ, self._heartbeat, self._connect_error)
                    attempts = 0
                else:
                    heartbeat.wait_for_first_rank(os.environ, self._facts)
                    self._has_had_rank = True
                heartbeat.choose_interface(os.environ)
                place = self._start_core()
                break
            except (ValueError, OSError) as error:
                horovod_world.stop()
                attempts += 1
                if attempts == _ATTEMPTS:
                    raise RankLost(f"cannot connect to the other ranks: {error}") from error
                self._connect_error = str(error).partition(". Please check")[
                    0
                ]  # Horovod refers to its log, which is off
                if isinstance(error, OSError):
                    time.sleep(1.0)
        self._heartbeat.world_formed()
        self.place = replace(place, local_rank=self.place.local_rank)  # keep the chosen GPU

    def _start_core(self) -> Place:
        """Start Horovod in a thread, since its core would wait for a dead driver forever."""
        outcome: Future[Place] = Future()

        def start() -> None:
            try:
                outcome.set_result(horovod_world.start())
            except BaseException as error:  # noqa: BLE001  # raised again below, in the thread that waits
                outcome.set_exception(error)

        threading.Thread(target=start, daemon=True, name="rendezvous").start()
        while not wait([outcome], _DRIVER_CHECK_S).done:
            gives_up = bool(self._connect_error) and self._heartbeat.requested == "stop"
            if gives_up or self._heartbeat.driver_gone:
                self._core_hangs = True
                gone = "the driver is gone, so this rank cannot connect to the others"
                raise DriverLost(self._connect_error if gives_up else gone)
        return outcome.result()

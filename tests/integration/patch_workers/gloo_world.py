"""Runs `gloo_world.py NUM_WORKERS SECONDS WORKER.py`: workers over Gloo on this machine, without horovodrun.

With `3+2` workers they believe that they are on two hosts, three on one and two on the other.

horovodrun stops all workers when one fails; here the others must go on, since what they do then is tested. Prints
each worker's output, `REQUESTS` with the number of requests that the store has had and the seconds from the first to
the last, and, as the last line, `EXIT [codes by rank]`.
"""

import os
import subprocess
import sys
import time

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousHandler, RendezvousServer

requests: list[float] = []


class Counting(RendezvousHandler):  # type: ignore[misc]  # Horovod has no types
    """Notes when requests come."""

    def parse_request(self) -> bool:
        """Note a request, and read it as Horovod does."""
        requests.append(time.monotonic())
        found: bool = super().parse_request()
        return found


def main() -> None:
    on_hosts, limit_s, worker = [int(number) for number in sys.argv[1].split("+")], float(sys.argv[2]), sys.argv[3]
    names = [f"host{number}" for number in range(len(on_hosts))] if len(on_hosts) > 1 else ["localhost"]
    slots = get_host_assignments([HostInfo(*host) for host in zip(names, on_hosts, strict=True)], sum(on_hosts))
    server = RendezvousServer(0)
    port = server.start(Counting)
    server.init(slots)
    common = create_run_env_vars("127.0.0.1", ["lo"], port)
    processes = []
    for slot in slots:
        env = {
            **os.environ,
            **{name: str(value) for name, value in common.items()},
            **create_slot_env_vars(slot),
        }
        processes.append(subprocess.Popen([sys.executable, worker], env=env, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    codes = [process.poll() for process in processes]  # None: it hung
    for process in processes:
        process.kill()
        process.wait()
    print("REQUESTS", len(requests), round(max(requests) - min(requests)), flush=True)
    print("EXIT", codes, flush=True)


if __name__ == "__main__":
    main()

"""Runs `gloo_world.py NUM_WORKERS SECONDS WORKER.py [NAME]`: workers over Gloo on this machine, without horovodrun.

horovodrun stops all workers when one fails; here the others must go on, since what they do then is tested. Prints
each worker's output and, as the last line, `EXIT [codes by rank]`.
"""

import os
import subprocess
import sys
import time

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer


def main() -> None:
    num_workers, limit_s, worker = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    slots = get_host_assignments([HostInfo("localhost", num_workers)], num_workers)
    server = RendezvousServer(0)
    port = server.start()
    server.init(slots)
    common = create_run_env_vars("127.0.0.1", ["lo"], port)
    processes = []
    for slot in slots:
        own = {name: str(value) for name, value in common.items()} | create_slot_env_vars(slot)
        processes.append(
            subprocess.Popen([sys.executable, *worker], env={**os.environ, **own}, stderr=subprocess.STDOUT)
        )
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    codes = [process.poll() for process in processes]  # None: it hung
    for process in processes:
        process.kill()
        process.wait()
    print("EXIT", codes, flush=True)


if __name__ == "__main__":
    main()

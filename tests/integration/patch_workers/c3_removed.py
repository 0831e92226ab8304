"""C3: an elastic job goes on without this worker; its next init() must end it with exit code 0."""

import os

import horovod.torch as hvd
from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, HostInfo, get_host_assignments
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer


class Driver:
    """The part of the elastic driver that the rendezvous server calls."""

    def record_ready(self, host: str, slot: int) -> None:
        pass

    def get_slot_info(self, host: str, slot: int) -> object:
        return INVALID_SLOT_INFO  # no rank for this worker


server = RendezvousServer(0)
port = server.start(create_rendezvous_handler(Driver()))
slots = get_host_assignments([HostInfo("localhost", 1)], 1)
server.init(slots)
env = create_run_env_vars("127.0.0.1", ["lo"], port, elastic=True)
os.environ.update({name: str(value) for name, value in env.items()})
os.environ.update(create_slot_env_vars(slots[0]))
hvd.init()
hvd.shutdown()
print("REMOVED", flush=True)
hvd.init()
print("STILL HERE", flush=True)

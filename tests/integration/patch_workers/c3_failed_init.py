"""C3: a peer never comes; init() must raise without ending the process, and a second init() must work."""

import os

import horovod.torch as hvd
import torch
from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer

server = RendezvousServer(0)
port = server.start()
slots = get_host_assignments([HostInfo("localhost", 2)], 2)
server.init(slots)
os.environ.update({name: str(value) for name, value in create_run_env_vars("127.0.0.1", ["lo"], port).items()})
os.environ.update(create_slot_env_vars(slots[0]))
os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "2"
try:
    hvd.init()
except ValueError as error:
    print("RAISED", error, flush=True)

del os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]  # a world of one
os.environ["HOROVOD_SIZE"] = os.environ["HOROVOD_LOCAL_SIZE"] = "1"
hvd.init()
print("SUM", hvd.allreduce(torch.ones(1), name="again", op=hvd.Sum).item(), flush=True)
